"""Who is let in: limits, checked before a byte of a body is read, and the gate against blacklisted servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from typing import Final, TypeAlias

from starlette.datastructures import Headers
from starlette.requests import Request

from federation.node.clients import Clients, Source
from federation.node.limits import Limit, Windows, deliveries_limit, spent_on_new_servers
from federation.node.refusals import Refusal
from federation.protocol.relaying import MAX_RELAYED_BYTES, ORIGIN_HEADER, RELAY_PATH
from federation.protocol.urls import MAX_URL_CHARACTERS
from federation.sealed.peers.registry import Registry

_HEADERS = ("origin", "x-federation-origin")
BODY_MEMBERS = ("url", "serverUrl")


class BlacklistGate:
    """Refuses requests that carry the name of a blacklisted server, in any spelling.

    There are no exemptions: Sipher lets a request pass that names this node itself as its origin, which anyone can
    write.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def check_headers(self, headers: Headers) -> None:
        """Refuse a request that names a blacklisted server in its headers.

        Raises:
            Refusal: it does.
        """
        await self.check(_named_in_headers(headers))

    async def check_body(self, value: object) -> None:
        """Refuse a request that names a blacklisted server in its parsed body.

        Raises:
            Refusal: it does.
        """
        await self.check(_named_in_body(value))

    async def check(self, named: Iterable[object]) -> None:
        """Check that none of the server URLs in *named* is blacklisted. What is no URL at all is ignored.

        Raises:
            Refusal: one of them is.
        """
        for url in {value for value in named if isinstance(value, str) and len(value) <= MAX_URL_CHARACTERS}:
            if await self._registry.is_blacklisted(url):
                raise Refusal(403, "Your server has been blacklisted.", reason="BLACKLISTED")


def _named_in_headers(headers: Headers) -> Iterator[str]:
    for name in _HEADERS:
        yield from headers.getlist(name)


def _named_in_body(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from (value.get(member) for member in BODY_MEMBERS)


RATE_LIMITED: Final = "RATE_LIMITED"

DISCOVER_PER_CLIENT: Final = Limit(requests=10, window=timedelta(hours=1))
ROTATION_PER_CLIENT: Final = Limit(requests=5, window=timedelta(minutes=1))
RELAY_PER_CLIENT: Final = Limit(requests=120, window=timedelta(minutes=1))
RELAY_PER_ORIGIN: Final = Limit(requests=100, window=timedelta(minutes=1))


DELIVERIES: Final = deliveries_limit(3000)
"""More than a process can handle."""

Admit: TypeAlias = Callable[[Request], Awaitable[None]]
"""Lets a request in, or raises its `Refusal`."""


async def everybody(_: Request) -> None:
    """Let every request in."""


class PerClient:
    """Limits requests per client and path. A client whose address is unknown is always let in (see `Clients`).

    All paths of an endpoint that has many count as *path*.
    """

    def __init__(self, limit: Limit, *, clients: Clients, windows: Windows, path: str | None = None) -> None:
        self._limit = limit
        self._clients = clients
        self._windows = windows
        self._path = path

    async def __call__(self, request: Request) -> None:
        address = self._clients.address(request)
        if address is None:
            return
        if not await self._windows.allows(f"{self._path or request.scope['path']}:{address}", self._limit):
            raise _too_many(self._limit, code=None)


class PerOrigin:
    """Limits the deliveries of a server. To be asked only about a name that the server has proved to be its own."""

    def __init__(self, limit: Limit, *, windows: Windows) -> None:
        self._limit = limit
        self._windows = windows

    async def __call__(self, origin: str) -> None:
        if not await self._windows.allows(f"inbox:{origin}", self._limit):
            raise _too_many(self._limit, code=RATE_LIMITED)


class PerRelayingOrigin:
    """Limits how often a server may relay, separately for each client that writes the server's name and its keys.

    Anybody can write them: relaying proves nothing. Whoever does it from elsewhere uses up nobody else's share.
    """

    def __init__(self, *, windows: Windows) -> None:
        self._windows = windows

    async def __call__(self, origin: str, client: str | None) -> None:
        subject = ":".join([RELAY_PATH.strip("/"), origin, *([client] if client else [])])
        if not await self._windows.allows(subject, RELAY_PER_ORIGIN):
            raise _too_many(RELAY_PER_ORIGIN, code=RATE_LIMITED)


class NewServers:
    """Limits how many servers that are not registered we get to know for others; see `spent_on_new_servers`."""

    def __init__(self, *, windows: Windows) -> None:
        self._windows = windows

    async def __call__(self, source: Source) -> None:
        limit = await spent_on_new_servers(self._windows, client=source.client, network=source.network)
        if limit is not None:
            raise _too_many(limit, code=None)


class ProxyAdmission:
    """Lets a request to `/proxy` in if it is small enough, says for whom it is, and does not exceed the limits."""

    def __init__(self, *, per_client: Admit) -> None:
        self._per_client = per_client

    async def __call__(self, request: Request) -> None:
        await self._per_client(request)
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > MAX_RELAYED_BYTES:
            raise too_large_to_relay(MAX_RELAYED_BYTES)
        if not request.headers.get(ORIGIN_HEADER, ""):
            raise Refusal(400, f"The {ORIGIN_HEADER} header is missing", code="MISSING_FED_ORIGIN_HEADER")


def too_large_to_relay(limit: int) -> Refusal:
    """Return the refusal of a body over *limit* bytes."""
    text = f"The body has more than {limit} bytes"
    return Refusal(413, text, code="PAYLOAD_TOO_LARGE", headers={"Connection": "close"})


def _too_many(limit: Limit, *, code: str | None) -> Refusal:
    seconds = round(limit.window.total_seconds())
    text = f"More than {limit.requests} requests in {seconds} seconds"
    return Refusal(429, text, code=code, reason=RATE_LIMITED, headers={"Retry-After": str(seconds)})
