"""Asking a server for its keys because somebody asked us to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from federation.http.client import FederationFetch
from federation.http.errors import BodyTooLarge, NetworkError
from federation.node.refusals import Refusal, try_later
from federation.node.shares import Places
from federation.protocol.urls import host_of
from workers.clock import monotonic

CALLBACK_TIMEOUT: Final = timedelta(seconds=10)
"""With the wait for a place: who registers does not wait longer for our answer."""
FAIR: Final = 0.9
"""A server that had less of the time, because of whoever asked for it, is not taken for a sick one."""
MAX_CALLBACKS: Final = 16
MAX_CALLBACKS_PER_HOST: Final = 12
"""Counted over all ports: a host that hangs on all of them still leaves room for others."""
MAX_CALLBACKS_PER_SERVER: Final = 4


class Callback:
    """Callable with the origin of a server. It is the only way to make this node talk to somebody on request.

    Only a few calls run at once, and fewer to one host, to one server, and for one client. Each may wait for a server
    of the requester's choice, on connections that deliveries use, too, and a server that hangs must not hold up the
    introductions of others.
    """

    def __init__(self, fetch: FederationFetch) -> None:
        self._fetch = fetch
        self._places = Places(MAX_CALLBACKS, full=_too_many)

    async def __call__(self, origin: str, holders: Sequence[str]) -> bytes:
        """Return the body that *origin*'s `/discover` answers, whatever its status.

        Raises:
            Refusal: 502 no answer, with the network error's code if that is why; 503 too many are being asked.
            BlockedUrl: the guard refuses it.
        """
        async with self.place(origin, holders) as end:
            return await self.document(origin, end=end)

    @asynccontextmanager
    async def place(self, origin: str, holders: Sequence[str]) -> AsyncIterator[float]:
        """Reserve a place for asking *origin*, one request after the other, until the block ends.

        Yields until when they have to be answered, by `monotonic`: ten seconds from now, with the wait for the place.

        Raises:
            Refusal: 503 too many are being asked.
        """
        end = monotonic() + CALLBACK_TIMEOUT.total_seconds()
        bounds = {host_of(origin): MAX_CALLBACKS_PER_HOST, origin: MAX_CALLBACKS_PER_SERVER}
        async with self._places.place(holders, bounds):
            yield end

    async def document(self, origin: str, *, end: float) -> bytes:
        """Do the same as the call itself, within a `place`, until *end*."""
        left = timedelta(seconds=end - monotonic())
        try:
            fetched = await self._fetch(
                f"{origin}/discover",
                timeout=left,
                server_url=origin,
                skip_health_update=left < FAIR * CALLBACK_TIMEOUT,
            )
        except NetworkError as error:
            # Not the error's text: it tells what a name resolves to inside our network.
            raise Refusal(502, f"{origin}/discover could not be fetched", code=error.code) from None
        except BodyTooLarge:
            raise no_document(origin) from None
        return fetched.response.body


def no_document(origin: str) -> Refusal:
    """Return the refusal for an *origin* that answers with something that cannot be a document."""
    return Refusal(502, f"{origin}/discover does not answer with JSON", reason="CALLBACK_NOT_JSON")


def _too_many() -> Refusal:
    return try_later("Too many servers are being asked for their keys", reason="CALLBACKS")
