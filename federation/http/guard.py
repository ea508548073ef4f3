"""Which URLs and addresses this node may be made to talk to (SSRF guard).

Theory of operation. Every outbound request passes two checks. `check_url` looks at the URL alone: it rebuilds it in one
canonical spelling, so that no later parser can read another host out of it, and refuses literal addresses that are not
public. `vet` looks at what a host name resolved to. The transport calls it between resolution and connection, and
connects to exactly the addresses checked here, so a name that resolves differently in between gains nothing. The HTTP
library never asks its resolver about literal addresses, which is why the first check may not be skipped. What names
lead to is remembered for seconds.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, Protocol
from urllib.parse import urlsplit

import httpx

from federation.base.cache import LoadingCache
from federation.http.addresses import Address, is_globally_routable
from federation.http.errors import BlockedAddress, BlockedUrl
from federation.protocol.urls import canonical_origin, host_of, with_port

_DEFAULT_PORTS = {"http": 80, "https": 443}
_METADATA_NAMES = frozenset({"metadata.google.internal", "metadata.goog"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A URL in canonical spelling; `address` is set if its host is a literal address."""

    url: httpx.URL
    origin: str
    host: str
    port: int
    address: Address | None


@dataclass(frozen=True, slots=True)
class AddressGuard:
    """Lets outbound requests reach the public Internet, and apart from that only what is in `allowed_hostnames`.

    These are hosts at any port, and hosts with a port, as `peer:4000` or `[::1]:4000`, at that one.
    """

    allowed_hostnames: frozenset[str] = frozenset()

    def check_url(self, url: str) -> Target:
        """Check that the text of *url* is acceptable, and return its canonical form.

        Raises:
            BlockedUrl: not an absolute http(s) URL, has user information, names a metadata service, or its host is a
                literal address (in any spelling) that is not globally routable.
        """
        target = parse_target(url)
        if self.exempts(target):
            return target
        if target.host in _METADATA_NAMES:
            raise BlockedUrl(f"{target.origin} is a cloud metadata service")
        if target.address is not None and not is_globally_routable(target.address):
            raise BlockedUrl(f"{target.origin} is not a public address; {_HOW_TO_ALLOW}")
        return target

    def exempts(self, target: Target) -> bool:
        """Tell whether the target is one of `allowed_hostnames`, to which nothing is forbidden."""
        return self._allows(target.host, target.port)

    def vet(self, host: str, addresses: Sequence[str], *, port: int) -> None:
        """Check that all *addresses*, to which *host* resolved just now, may be connected to at *port*.

        Raises:
            BlockedAddress: there is none, or one of them is not globally routable (one is enough: a name that mixes
                public and internal addresses is an attack or a mistake).
        """
        if not addresses:
            raise BlockedAddress(host, "the name resolves to no address")
        if self._allows(host, port):
            return
        for address in addresses:
            if not _is_public(address):
                raise BlockedAddress(host, f"the name resolves to {address}, not a public address; {_HOW_TO_ALLOW}")

    def _allows(self, host: str, port: int) -> bool:
        return host in self.allowed_hostnames or with_port(host, port) in self.allowed_hostnames


_HOW_TO_ALLOW = "DEV_ALLOWED_HOSTNAMES can exempt the host"


@lru_cache(maxsize=1024)
def parse_target(url: str) -> Target:
    """Parse *url* into canonical spelling: lower-case host without trailing dot, addresses decoded, no default port.

    Raises:
        BlockedUrl: not an absolute http(s) URL of at most 2048 characters with a usable host and no user information.
    """
    try:
        origin = canonical_origin(url)
        parts = urlsplit(url)
        query = f"?{parts.query}" if parts.query else ""
        target = httpx.URL(f"{origin}{parts.path or '/'}{query}")
    except (ValueError, httpx.InvalidURL) as exc:  # every error of the parser is a ValueError
        raise BlockedUrl(f"not a URL that can be fetched: {exc}") from exc
    host = host_of(origin)
    port = target.port or _DEFAULT_PORTS[target.scheme]
    return Target(url=target, origin=origin, host=host, port=port, address=_literal(host))


def _is_public(text: str) -> bool:
    address = _literal(text)
    return address is not None and is_globally_routable(address)


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


REMEMBERED: Final = timedelta(seconds=10)
_MAX_NAMES: Final = 2048
_THREADS: Final = 80


class Resolver(Protocol):
    """Resolves host names to addresses."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of *host*, in the order in which to try them.

        Raises:
            OSError: `socket.gaierror` if the name has none or the name service does not answer.
        """


class SystemResolver:
    """The operating system's resolver, on threads of its own.

    A lookup that hangs holds its thread for up to half a minute, even when nobody waits for it any more. In the event
    loop's shared pool, a few of them would stop everything else that needs a thread. Strangers can make the inbound
    side look up names of their choice; there are more threads here than lookups that they can have under way.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="resolve")

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _getaddrinfo, host, port)


def _getaddrinfo(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(sockaddr[0]) for *_, sockaddr in found]


class VettedNames:
    """Gives only addresses that have passed the guard: what is remembered for ten seconds, and connected to."""

    def __init__(self, guard: AddressGuard, resolver: Resolver) -> None:
        self._guard = guard
        self._resolver = resolver
        self._known: LoadingCache[Sequence[str]] = LoadingCache(self._look_up, ttl=REMEMBERED, max_entries=_MAX_NAMES)

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses to connect to at *port*. Whoever asks for the same at a time shares one lookup.

        Raises:
            BlockedAddress: the name leads to an address that is not public.
            OSError: as `Resolver.resolve`.
        """
        return await self._known.get(f"{host} {port}")

    async def close(self) -> None:
        """End lookups that nobody waits for any more."""
        await self._known.close()

    async def _look_up(self, key: str) -> Sequence[str]:
        host, port = key.split(" ")
        addresses = await self._resolver.resolve(host, int(port))
        self._guard.vet(host, addresses, port=int(port))
        return addresses
