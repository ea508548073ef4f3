"""Request bodies, read within bounds of size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from starlette.requests import ClientDisconnect, Request

from federation.node.refusals import FrameworkRefusal, try_later

BODY_TIMEOUT = timedelta(seconds=15)
BODY_MEMORY_BYTES = 64 * 1024 * 1024
DISCARDED_BYTES = 16 * 1024 * 1024
"""How much of a body over its limit is read and dropped: a client that is still sending would miss the answer."""

# What is left of a refused body may still be on its way: the connection cannot be used again.
_CLOSE = {"Connection": "close"}


class BodyReader:
    """Reads request bodies; those being read or worked on take at most *memory* bytes together.

    A body has *timeout* to arrive. A flood of large or slow bodies thus costs a known amount of memory, and what does
    not fit is told to come back.
    """

    def __init__(self, *, timeout: timedelta = BODY_TIMEOUT, memory: int = BODY_MEMORY_BYTES) -> None:
        self._timeout = timeout.total_seconds()
        self._memory = memory
        self._held = 0

    @asynccontextmanager
    async def read(self, request: Request, *, limit: int) -> AsyncIterator[bytes]:
        """The whole body; its memory counts as taken until the block ends.

        Raises:
            Refusal: 413 over *limit* bytes, 408 too slow or cut off, 503 no memory left for it.
        """
        body = bytearray()
        try:
            await self._fill(body, request, limit)
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def _fill(self, body: bytearray, request: Request, limit: int) -> None:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit + DISCARDED_BYTES:
            raise _too_large(limit)
        received = 0
        try:
            async with asyncio.timeout(self._timeout):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received <= limit:
                        self._keep(body, chunk)
                    elif received > limit + DISCARDED_BYTES:
                        break
        except TimeoutError:
            text = f"The body did not arrive within {self._timeout:g} seconds"
            raise FrameworkRefusal(408, text, code="REQUEST_TIMEOUT", headers=_CLOSE) from None
        except ClientDisconnect:
            raise FrameworkRefusal(408, "The body broke off", code="REQUEST_TIMEOUT", headers=_CLOSE) from None
        if received > limit:
            raise _too_large(limit)

    def _keep(self, body: bytearray, chunk: bytes) -> None:
        body += chunk
        self._held += len(chunk)
        if self._held > self._memory:
            raise try_later("Too many large requests at once", reason="BODY_MEMORY")


def _too_large(limit: int) -> FrameworkRefusal:
    return FrameworkRefusal(413, f"The body has more than {limit} bytes", code="PAYLOAD_TOO_LARGE", headers=_CLOSE)
