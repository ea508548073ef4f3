"""Asking a server for its keys because somebody asked us to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from federation.http.client import FederationFetch
from federation.http.errors import BodyTooLarge, NetworkError
from federation.node.refusals import Refusal, try_later
from federation.protocol.urls import host_of

CALLBACK_TIMEOUT: Final = timedelta(seconds=10)
MAX_CALLBACKS: Final = 16
MAX_CALLBACKS_PER_HOST: Final = 12
"""Counted over all ports: a host that hangs on all of them still leaves room for others."""
MAX_CALLBACKS_PER_SERVER: Final = 4


class Callback:
    """Callable with the origin of a server. It is the only way to make this node talk to somebody on request.

    Only a few calls run at once, and fewer to one host and to one server. Each may wait for a server of the requester's
    choice, on connections that deliveries use, too, and a server that hangs must not hold up the introductions of
    others.
    """

    def __init__(self, fetch: FederationFetch) -> None:
        self._fetch = fetch
        self._under_way: Counter[str] = Counter()

    async def __call__(self, origin: str) -> bytes:
        """Return the body that *origin*'s `/discover` answers within ten seconds, whatever its status.

        Raises:
            Refusal: 502 no answer, with the network error's code if that is why; 503 too many are being asked.
            BlockedUrl: the guard refuses it.
        """
        with self.place(origin):
            return await self.document(origin)

    @contextmanager
    def place(self, origin: str) -> Iterator[None]:
        """Reserve a place for asking *origin*, one request after the other, until the block ends.

        Raises:
            Refusal: 503 too many are being asked.
        """
        bounds = {"": MAX_CALLBACKS, host_of(origin): MAX_CALLBACKS_PER_HOST, origin: MAX_CALLBACKS_PER_SERVER}
        if any(self._under_way[name] >= bound for name, bound in bounds.items()):
            raise try_later("Too many servers are being asked for their keys", reason="CALLBACKS")
        self._under_way.update(bounds.keys())
        try:
            yield
        finally:
            self._under_way.subtract(bounds.keys())
            self._under_way = +self._under_way  # forgets those at zero

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
