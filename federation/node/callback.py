"""Asking a server for its keys because somebody asked us to."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from federation.http.errors import BodyTooLarge, NetworkError
from federation.http.gates import FederationFetch
from federation.node.refusals import Refusal, try_later

CALLBACK_TIMEOUT: Final = timedelta(seconds=10)
MAX_CALLBACKS: Final = 16


class Callback:
    """Callable with the origin of a server; the one way to make this node talk to somebody on request.

    Only a few run at once: each may wait on a server of the requester's choice, on connections deliveries use, too.
    """

    def __init__(self, fetch: FederationFetch) -> None:
        self._fetch = fetch
        self._slots = asyncio.Semaphore(MAX_CALLBACKS)

    async def __call__(self, origin: str) -> bytes:
        """What *origin*'s `/discover` answers within ten seconds, whatever its status.

        Raises:
            Refusal: 502 no answer, with the network error's code if that is why; 503 too many are being asked.
            BlockedUrl: the guard refuses it.
        """
        if self._slots.locked():
            raise try_later("Too many servers are being asked for their keys", reason="CALLBACKS")
        async with self._slots:
            try:
                fetched = await self._fetch(f"{origin}/discover", timeout=CALLBACK_TIMEOUT, server_url=origin)
            except NetworkError as error:
                # Not the error's text: it tells what a name resolves to inside our network.
                raise Refusal(502, f"{origin}/discover could not be fetched", code=error.code) from None
            except BodyTooLarge:
                raise no_document(origin) from None
        return fetched.response.body


def no_document(origin: str) -> Refusal:
    """The refusal where *origin* answers with something that cannot be a document."""
    return Refusal(502, f"{origin}/discover does not answer with JSON", reason="CALLBACK_NOT_JSON")
