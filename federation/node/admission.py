"""What is asked of a request before a byte of its body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, TypeAlias

from starlette.requests import Request

from federation.node.clients import Clients
from federation.node.limits import Limit, Windows
from federation.node.refusals import Refusal
from federation.protocol.errors import UrlError
from federation.protocol.relaying import MAX_RELAYED_BYTES, ORIGIN_HEADER, RELAY_PATH
from federation.protocol.urls import canonical_origin

RATE_LIMITED: Final = "RATE_LIMITED"

DISCOVER_PER_CLIENT: Final = Limit(requests=10, window=timedelta(hours=1))
ROTATION_PER_CLIENT: Final = Limit(requests=5, window=timedelta(minutes=1))
RELAY_PER_CLIENT: Final = Limit(requests=120, window=timedelta(minutes=1))
RELAY_PER_ORIGIN: Final = Limit(requests=100, window=timedelta(minutes=1))

_NO_SERVER: Final = "invalid"
"""What all origins that name no server share."""


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


class ProxyAdmission:
    """Lets a request to `/proxy` in that is small enough, says for whom it is, and is not one of too many."""

    def __init__(self, *, per_client: Admit, windows: Windows) -> None:
        self._per_client = per_client
        self._windows = windows

    async def __call__(self, request: Request) -> None:
        await self._per_client(request)
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > MAX_RELAYED_BYTES:
            raise too_large_to_relay(MAX_RELAYED_BYTES)
        claimed = request.headers.get(ORIGIN_HEADER, "")
        if not claimed:
            raise Refusal(400, f"The {ORIGIN_HEADER} header is missing", code="MISSING_FED_ORIGIN_HEADER")
        # Anybody can write this header; the limit per client is what stops those who write others' names.
        if not await self._windows.allows(f"{RELAY_PATH.strip('/')}:{_origin(claimed)}", RELAY_PER_ORIGIN):
            raise _too_many(RELAY_PER_ORIGIN, code=RATE_LIMITED)


def too_large_to_relay(limit: int) -> Refusal:
    """The refusal of a body over *limit* bytes."""
    text = f"The body has more than {limit} bytes"
    return Refusal(413, text, code="PAYLOAD_TOO_LARGE", headers={"Connection": "close"})


def _too_many(limit: Limit, *, code: str | None) -> Refusal:
    seconds = round(limit.window.total_seconds())
    text = f"More than {limit.requests} requests in {seconds} seconds"
    return Refusal(429, text, code=code, reason=RATE_LIMITED, headers={"Retry-After": str(seconds)})


def _origin(claimed: str) -> str:
    try:
        return canonical_origin(claimed)
    except UrlError:
        return _NO_SERVER
