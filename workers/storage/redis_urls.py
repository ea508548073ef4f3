"""URLs of Redis servers: those that stand in for each other, and replicas to wait for.

A cluster, or a master that Sentinels watch:

    redis+cluster://user:password@host:port,host:port
    redis+sentinel://user:password@host:port,host:port/service/database

A cluster's URL names some of its nodes, the other one Sentinels. `rediss+...` is the same over TLS, for Sentinels too.
User and password are those of the Redis servers; Sentinels have `?sentinel_username=` and `?sentinel_password=`.

Redis and Valkey replicate after they have answered, so a master that dies takes with it what it acknowledged last.
With `?wait_replicas=1`, and `&wait_timeout_ms=`, whatever changes a job in the name of a producer, an operator or a
settlement is followed by `WAIT`, on the same connection. Claims, renewals, progress and recoveries are not. When a
claim is lost, another worker claims the job, and the former one's token is worth nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from workers.errors import NotReplicated, StorageError

Address: TypeAlias = tuple[str, int]

CLUSTER_SCHEMES: Final = ("redis+cluster", "rediss+cluster")
SENTINEL_SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
SCHEMES: Final = (*CLUSTER_SCHEMES, *SENTINEL_SCHEMES)

CLUSTER_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
WAIT_MS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What such a URL says. `server_url` is that of one server, with the settings of each, as redis-py takes it."""

    nodes: tuple[Address, ...]
    service: str | None  # what Sentinels call the master; None for a cluster
    server_url: str = field(repr=False)
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)

    @property
    def is_cluster(self) -> bool:
        return self.service is None


def read_deployment(url: str) -> Deployment | None:
    """Read the URL; None for that of a single server.

    Raises:
        StorageError: it is malformed; no part of it is quoted.
    """
    if url.partition(":")[0] not in SCHEMES:
        return None
    try:
        return _read(url)
    except ValueError as error:
        raise StorageError(f"not the URL of a cluster or of Sentinels: {error}") from None


def take_parameter(url: str, name: str) -> tuple[str, str | None]:
    """Return the URL without that parameter, and its value, None if it is not there.

    Raises:
        StorageError: the URL is malformed.
    """
    parts = _split(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    value = query.pop(name, None)
    return urlunsplit(parts._replace(query=urlencode(query))), value


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its text may quote a part of a password
        raise StorageError("not the URL of a Redis server: its address is malformed") from None


def _read(url: str) -> Deployment:
    parts = _split(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    sentinel = (query.pop("sentinel_username", None), query.pop("sentinel_password", None))
    database, service = parts.path.strip("/"), None
    if parts.scheme in SENTINEL_SCHEMES:
        service, _, database = database.partition("/")
        if not service:
            raise ValueError("the path begins with the name of the master, as /mymaster")
    if database and not database.isdecimal():
        raise ValueError("the path ends with the number of the database")
    port = CLUSTER_PORT if service is None else SENTINEL_PORT
    nodes = tuple(_address(host, port) for host in hosts.split(","))
    netloc = f"{credentials}@localhost" if credentials else "localhost"
    return Deployment(
        nodes=nodes,
        service=None if service is None else unquote(service),
        server_url=urlunsplit((parts.scheme.partition("+")[0], netloc, f"/{database}", urlencode(query), "")),
        sentinel_username=sentinel[0],
        sentinel_password=sentinel[1],
    )


def _address(text: str, port: int) -> Address:
    """Read `host`, `host:port` or `[address]:port`."""
    try:
        parts = urlsplit(f"//{text}")
        host, named = parts.hostname, parts.port
    except ValueError:
        raise ValueError("an address is malformed; write host:port,host:port") from None
    if not host or named == 0:
        raise ValueError("an address has no host or no port; write host:port,host:port")
    return host, named or port


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """How many replicas have to confirm a change, and how long that may take."""

    replicas: int
    wait_ms: int = WAIT_MS

    @property
    def command(self) -> tuple[str | int, ...]:
        """The command that waits for what was sent before it on its connection."""
        return "WAIT", self.replicas, self.wait_ms

    def check(self, confirmed: int) -> None:
        """Take the answer to the command.

        Raises:
            NotReplicated: too few replicas have confirmed.
        """
        if confirmed < self.replicas:
            raise NotReplicated(
                f"{confirmed} of {self.replicas} replicas confirmed the change within {self.wait_ms} ms;"
                " it is stored on the master, and may be lost with it"
            )


def take_replication(url: str, timeout: timedelta) -> tuple[str, Replication | None]:
    """Return the URL without `?wait_replicas=` and `?wait_timeout_ms=`, and what they say, None without them.

    Raises:
        StorageError: they are no numbers above 0, or the wait takes no less than a whole call, which is `timeout`.
    """
    url, replicas = take_parameter(url, "wait_replicas")
    url, named_ms = take_parameter(url, "wait_timeout_ms")
    if replicas is None:
        return url, None
    wait_ms = str(WAIT_MS) if named_ms is None else named_ms
    if not _is_positive(replicas) or not _is_positive(wait_ms):
        raise StorageError("wait_replicas and wait_timeout_ms are whole numbers above 0")
    if timedelta(milliseconds=int(wait_ms)) >= timeout:
        raise StorageError(
            f"wait_timeout_ms has to be less than the time of a call, {timeout.total_seconds() * 1000:g}"
        )
    return url, Replication(replicas=int(replicas), wait_ms=int(wait_ms))


def _is_positive(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0
