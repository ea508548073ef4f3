"""Asking a server for its keys because somebody asked us to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Final

from federation.http.client import FederationFetch
from federation.http.errors import BodyTooLarge, NetworkError
from federation.node.refusals import Refusal, try_later
from federation.node.shares import Places
from federation.protocol.urls import host_of

CALLBACK_TIMEOUT: Final = timedelta(seconds=10)
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
        """Return the body that *origin*'s `/discover` answers within ten seconds, whatever its status.

        Raises:
            Refusal: 502 no answer, with the network error's code if that is why; 503 too many are being asked.
            BlockedUrl: the guard refuses it.
        """
        async with self.place(origin, holders):
            return await self.document(origin)

    def place(self, origin: str, holders: Sequence[str]) -> AbstractAsyncContextManager[None]:
        """Reserve a place for asking *origin*, one request after the other, until the block ends.

        Raises:
            Refusal: 503 too many are being asked.
        """
        return self._places.place(holders, {host_of(origin): MAX_CALLBACKS_PER_HOST, origin: MAX_CALLBACKS_PER_SERVER})

    async def document(self, origin: str) -> bytes:
        """Do the same as the call itself, within a `place`."""
        try:
            fetched = await self._fetch(f"{origin}/discover", timeout=CALLBACK_TIMEOUT, server_url=origin)
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
