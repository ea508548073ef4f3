"""URLs of Redis servers that stand in for each other: a cluster, or a master that Sentinels watch.

    redis+cluster://user:password@host:port,host:port
    redis+sentinel://user:password@host:port,host:port/service/database

A cluster's URL names some of its nodes, the other one Sentinels. `rediss+...` is the same over TLS, for Sentinels too.
User and password are those of the Redis servers; Sentinels have `?sentinel_username=` and `?sentinel_password=`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from workers.errors import StorageError

Address: TypeAlias = tuple[str, int]

CLUSTER_SCHEMES: Final = ("redis+cluster", "rediss+cluster")
SENTINEL_SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
SCHEMES: Final = (*CLUSTER_SCHEMES, *SENTINEL_SCHEMES)

CLUSTER_PORT: Final = 6379
SENTINEL_PORT: Final = 26379


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
    """Read the URL, which `take_parameter` has seen; None for that of a single server.

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
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may quote a part of a password
        raise StorageError("not the URL of a Redis server: its address is malformed") from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    value = query.pop(name, None)
    return urlunsplit(parts._replace(query=urlencode(query))), value


def _read(url: str) -> Deployment:
    parts = urlsplit(url)
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
