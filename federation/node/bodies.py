"""Request bodies, read within bounds of size, time and memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request

from federation.node.refusals import FrameworkRefusal, Refusal, try_later

BODY_TIMEOUT = timedelta(seconds=15)
BODY_MEMORY_BYTES = 64 * 1024 * 1024
DISCARDED_BYTES = 16 * 1024 * 1024
"""How much of a body over its limit is read and dropped: a client that is still sending would miss the answer."""

# What is left of a refused body may still be on its way: the connection cannot be used again.
_CLOSE = {"Connection": "close"}


TooLarge: TypeAlias = Callable[[int], Refusal]
"""Makes the refusal of a body over so many bytes."""


def framework_too_large(limit: int) -> Refusal:
    """That of most endpoints."""
    return FrameworkRefusal(413, f"The body has more than {limit} bytes", code="PAYLOAD_TOO_LARGE", headers=_CLOSE)


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
    async def read(
        self, request: Request, *, limit: int, too_large: TooLarge = framework_too_large
    ) -> AsyncIterator[bytes]:
        """The whole body; its memory counts as taken until the block ends.

        Raises:
            Refusal: *too_large*'s, 413, over *limit* bytes; 408 too slow or cut off; 503 no memory left for it.
        """
        body = bytearray()
        try:
            await self._fill(body, request, limit, too_large)
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def discard(self, request: Request) -> None:
        """The body was read and dropped, if it is not too long for that: its sender can read the refusal."""
        if _announced(request) > DISCARDED_BYTES:
            return
        received = 0
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(self._timeout):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > DISCARDED_BYTES:
                        break

    async def _fill(self, body: bytearray, request: Request, limit: int, too_large: TooLarge) -> None:
        if _announced(request) > limit + DISCARDED_BYTES:
            raise too_large(limit)
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
            raise too_large(limit)

    def _keep(self, body: bytearray, chunk: bytes) -> None:
        body += chunk
        self._held += len(chunk)
        if self._held > self._memory:
            raise try_later("Too many large requests at once", reason="BODY_MEMORY")


def _announced(request: Request) -> int:
    announced = request.headers.get("content-length", "")
    return int(announced[:20]) if announced.isdecimal() else 0
