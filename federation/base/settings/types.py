"""The types of settings: which values are accepted, and what to write instead. No error quotes a value."""

from __future__ import annotations

import re
from datetime import timedelta
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr

from db.url import parse_url
from federation.base.settings.directories import parse_directory
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin, host_of, with_port
from workers.checks import LONGEST_LEASE
from workers.errors import StorageError
from workers.storage.redis_urls import Deployment, read_deployment, take_parameter, take_replication

LONGEST_DURATION: Final = timedelta(days=365)
SHORTEST_LOG: Final = timedelta(days=3)
"""The analytics read the last two days each night, a while after midnight, and a night may fail."""
KEY_BITS: Final = (2048, 3072, 4096)
BULL_DIALECT: Final = "C"

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>ms|s|m|h|d)?")


class JobPayload(StrEnum):
    """How a job carries the text of its delivery."""

    REFERENCE = "reference"
    INLINE = "inline"


class FirstKnock(StrEnum):
    """The kinds of signature by which a server may be tried first."""

    CAVAGE = "cavage"
    RFC9421 = "rfc9421"


def parse_duration(value: object) -> timedelta:
    """Parse a duration such as `250ms`, `5s`, `10m`, `2h`, `7d`; a bare number is seconds.

    Raises:
        ValueError: anything else, nothing, or more than a year.
    """
    duration = value if isinstance(value, timedelta) else _duration(str(value).strip())
    if not timedelta(0) < duration <= LONGEST_DURATION:
        raise ValueError(f"must be longer than nothing and at most {LONGEST_DURATION.days} days")
    return duration


def _log_age(duration: timedelta) -> timedelta:
    if duration < SHORTEST_LOG:
        raise ValueError(f"must be at least {SHORTEST_LOG.days}d: each night the analytics export the two days before")
    return duration


def _lease(duration: timedelta) -> timedelta:
    if duration > LONGEST_LEASE:
        raise ValueError(f"must be at most {LONGEST_LEASE.days}d: it is renewed while a delivery is under way")
    return duration


def parse_age(value: object) -> timedelta | None:
    """Parse a duration as `parse_duration` does; 0 means no limit, and returns None."""
    return None if value is None or str(value).strip() == "0" else parse_duration(value)


def _duration(text: str) -> timedelta:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("write a duration as 250ms, 5s, 10m, 2h or 7d")
    try:
        return timedelta(seconds=float(match["number"]) * _UNITS[match["unit"] or "s"])
    except OverflowError:
        return timedelta.max


def _own_origin(value: str) -> str:
    try:
        return canonical_origin(value)
    except UrlError as error:
        raise ValueError(f"must be this node's own URL, as https://node.example: {error}") from None


def parse_allowed_hostnames(text: str) -> frozenset[str]:
    """Return the hosts, and hosts with a port, in a comma list of `host`, `host:port` or URLs, possibly quoted.

    An entry with a port opens that one alone; a URL without one counts as its host.

    Raises:
        ValueError: an entry has no host; it is named in the message.
    """
    return frozenset(
        _allowed_host(entry) for part in text.strip().strip("\"'").split(",") if (entry := part.strip(" \t\"'"))
    )


def _allowed_host(entry: str) -> str:
    authority = urlsplit(entry).netloc.rpartition("@")[2] if "://" in entry else entry.partition("/")[0]
    if authority.count(":") > 1 and not authority.startswith("["):
        authority = f"[{authority}]"
    try:
        host = host_of(canonical_origin(f"http://{authority}"))
    except UrlError as exc:
        raise ValueError(f"DEV_ALLOWED_HOSTNAMES: {entry!r} names no host: {exc}") from exc
    port = urlsplit(f"http://{authority}").port
    return host if port is None else with_port(host, port)


def _hostnames(value: object) -> object:
    try:
        return parse_allowed_hostnames(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be hosts, host:port or URLs, separated by commas") from None


def _modules(value: object) -> object:
    if not isinstance(value, str):
        return value
    names = [name.strip() for name in value.split(",")]
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("must be names of modules, as shop.tasks, separated by commas")
    return tuple(names)


def _directory(value: object) -> object:
    return parse_directory(value) if isinstance(value, str) else value


def _networks(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return tuple(ip_network(part.strip()) for part in value.split(",") if part.strip())
    except ValueError:
        raise ValueError("must be addresses or networks, as 10.0.0.7 or 10.0.0.0/8, separated by commas") from None


_BULL: Final = "bull+"
_BULLMQ: Final = "bullmq+"
_WAITS: Final = ("wait_replicas", "wait_timeout_ms")
_OUR_OPTIONS: Final = {
    "": ("queue", *_WAITS),
    _BULLMQ: ("max_foreign_stalls", "metrics", *_WAITS),
    _BULL: ("dialect", *_WAITS),
}
"""What a storage reads of its URL itself, and checks. REDIS_URL is that of BullMQ's queues, too."""


def _database_url(value: SecretStr) -> SecretStr:
    parse_url(value.get_secret_value())
    return value


def _redis_url(value: SecretStr, layout: str = _BULLMQ) -> SecretStr:
    url = value.get_secret_value()
    deployment = _deployment(url)
    if deployment is not None and deployment.is_cluster:
        raise ValueError("a cluster is for queues alone: name it in QUEUE_URL, as bullmq+redis+cluster://host:port")
    if deployment is not None:
        _check_options(url, layout)
        return value
    try:
        parts = urlsplit(url)
        server = parts.scheme in ("redis", "rediss") and parts.hostname and parts.port != 0
    except ValueError:  # its text may quote a part of a password
        server = False
    if not server and not url.startswith("unix://"):
        raise ValueError("must be redis://[user:password@]host:port[/db], or rediss:// for TLS")
    if "allow_eviction" in dict(parse_qsl(urlsplit(url).query, keep_blank_values=True)):
        raise ValueError("no ?allow_eviction= here: set FEDERATION_ALLOW_EVICTION")
    _check_options(url, layout)
    return value


def _check_options(url: str, layout: str) -> None:
    """Refuse what redis-py does not know, before it would say so of each connection."""
    try:
        from workers.storage.redis import check_target  # here: only these URLs need the package
    except ImportError:
        return
    for own in _OUR_OPTIONS[layout]:
        url, _ = take_parameter(url, own)
    try:
        check_target(url)
    except StorageError as error:
        raise ValueError(str(error)) from None


def _deployment(url: str) -> Deployment | None:
    try:
        take_replication(url, LONGEST_DURATION)
        return read_deployment(take_parameter(url, "queue")[0])
    except StorageError as error:
        raise ValueError(f"is {error}") from None


def _queue_url(value: SecretStr) -> SecretStr:
    url = value.get_secret_value()
    if url.startswith(("sqlite:", "postgresql:", "postgresql+", "postgres:")):
        return _database_url(value)
    for layout in _OUR_OPTIONS:
        if url.startswith((f"{layout}redis://", f"{layout}rediss://", f"{layout}redis+", f"{layout}rediss+")):
            _queue_server(SecretStr(url.removeprefix(layout)), layout)
            if layout == _BULL:
                _check_dialect(url)
            return value
    if url.startswith("file:///") and url.removeprefix("file:///"):
        return value
    raise ValueError(
        "must be sqlite:///path/to/file.db, postgresql://user@host/name, file:///path/to/directory, redis://host:port,"
        " bullmq+redis://host:port or bull+redis://host:port, each also as redis+sentinel:// or redis+cluster://;"
        " no other queue storage is known"
    )


def _queue_server(value: SecretStr, layout: str) -> None:
    deployment = _deployment(value.get_secret_value())
    if deployment is None:
        _redis_url(value, layout)
    elif deployment.is_cluster and layout == _BULL:
        raise ValueError("Bull's keys carry no hash tags, so its queues cannot be on a cluster")


def _check_dialect(url: str) -> None:
    """Refuse the dialects A and B of Node's Bull 1.0 and older: they take our ids, which are words, for numbers."""
    spoken = [value for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True) if name == "dialect"]
    if any(dialect != BULL_DIALECT for dialect in spoken):
        raise ValueError(f"?dialect= must be {BULL_DIALECT}, of Bull 1.1, or left out: older ones take no ids of ours")


def _key_bits(bits: int) -> int:
    if bits not in KEY_BITS:
        raise ValueError(f"must be one of {', '.join(map(str, KEY_BITS))}: other servers take no other keys")
    return bits


def plain(value: SecretStr | str | None) -> str | None:
    """Return the value itself, out of its wrapping."""
    return value.get_secret_value() if isinstance(value, SecretStr) else value


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
LogAge = Annotated[Duration, AfterValidator(_log_age)]
Lease = Annotated[Duration, AfterValidator(_lease)]
Age = Annotated[timedelta | None, BeforeValidator(parse_age)]
KeyBits = Annotated[int, AfterValidator(_key_bits)]
OwnOrigin = Annotated[str, AfterValidator(_own_origin)]
Hostnames = Annotated[frozenset[str], BeforeValidator(_hostnames)]
Directory = Annotated[Path, BeforeValidator(_directory)]
Modules = Annotated[tuple[str, ...], BeforeValidator(_modules)]
Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], BeforeValidator(_networks)]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]
QueueUrl = Annotated[SecretStr, AfterValidator(_queue_url)]
