"""What is asked of a request before a byte of its body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, TypeAlias

from starlette.requests import Request

from federation.node.clients import Clients
from federation.node.limits import Limit, Windows
from federation.node.refusals import Refusal
from federation.protocol.relaying import MAX_RELAYED_BYTES, ORIGIN_HEADER, RELAY_PATH

RATE_LIMITED: Final = "RATE_LIMITED"

DISCOVER_PER_CLIENT: Final = Limit(requests=10, window=timedelta(hours=1))
ROTATION_PER_CLIENT: Final = Limit(requests=5, window=timedelta(minutes=1))
NEW_SERVERS_PER_NETWORK: Final = Limit(requests=100, window=timedelta(hours=1))
RELAY_PER_CLIENT: Final = Limit(requests=120, window=timedelta(minutes=1))
RELAY_PER_ORIGIN: Final = Limit(requests=100, window=timedelta(minutes=1))


def deliveries_limit(requests: int) -> Limit:
    """So many follows or posts at once; the window is that of the other implementation."""
    return Limit(requests=requests, window=timedelta(seconds=10))


DELIVERIES: Final = deliveries_limit(3000)
"""More than a process can take."""

Admit: TypeAlias = Callable[[Request], Awaitable[None]]
"""Lets a request in; raises its `Refusal` otherwise."""


async def everybody(_: Request) -> None:
    """Every request is let in."""


class PerClient:
    """Lets a client in so often per path; one whose address is not known always (see `Clients`)."""

    def __init__(self, limit: Limit, *, clients: Clients, windows: Windows) -> None:
        self._limit = limit
        self._clients = clients
        self._windows = windows

    async def __call__(self, request: Request) -> None:
        address = self._clients.address(request)
        if address is None:
            return
        if not await self._windows.allows(f"{request.scope['path']}:{address}", self._limit):
            raise _too_many(self._limit, code=None)


class PerOrigin:
    """Lets a server's deliveries in so often; to be asked only of what the server has proved to be its own."""

    def __init__(self, limit: Limit, *, windows: Windows) -> None:
        self._limit = limit
        self._windows = windows

    async def __call__(self, origin: str) -> None:
        if not await self._windows.allows(f"inbox:{origin}", self._limit):
            raise _too_many(self._limit, code=RATE_LIMITED)


class PerRelayingOrigin:
    """Lets a server relay so often, for each client that writes its name and its keys.

    Anybody can: relaying proves nothing. Who does it from elsewhere spends nobody else's share.
    """

    def __init__(self, *, windows: Windows) -> None:
        self._windows = windows

    async def __call__(self, origin: str, client: str | None) -> None:
        subject = ":".join([RELAY_PATH.strip("/"), origin, *([client] if client else [])])
        if not await self._windows.allows(subject, RELAY_PER_ORIGIN):
            raise _too_many(RELAY_PER_ORIGIN, code=RATE_LIMITED)


class PerNetwork:
    """Lets so many servers that nobody knew register from one network; from one that is not known any number."""

    def __init__(self, *, windows: Windows) -> None:
        self._windows = windows

    async def __call__(self, network: str | None) -> None:
        if network is None:
            return
        if not await self._windows.allows(f"register:{network}", NEW_SERVERS_PER_NETWORK):
            raise _too_many(NEW_SERVERS_PER_NETWORK, code=None)


class ProxyAdmission:
    """Lets a request to `/proxy` in that is small enough, says for whom it is, and is not one of too many."""

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
    """The refusal of a body over *limit* bytes."""
    text = f"The body has more than {limit} bytes"
    return Refusal(413, text, code="PAYLOAD_TOO_LARGE", headers={"Connection": "close"})


def _too_many(limit: Limit, *, code: str | None) -> Refusal:
    seconds = round(limit.window.total_seconds())
    text = f"More than {limit.requests} requests in {seconds} seconds"
    return Refusal(429, text, code=code, reason=RATE_LIMITED, headers={"Retry-After": str(seconds)})
