"""Request bodies, read within bounds of size, time and memory.

Theory of operation. A body counts by the memory that it takes: its bytes while it arrives, several times as much once
it is complete, for what is made of it. A body over 64 KiB is read only if somebody vouches for its sender, and then
waits for its turn (`HeavyWork`). A stranger's large body is refused by its announced length, or once that much of it
has come. Small bodies and large ones have memory of their own: large ones that never end keep no small one out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias

from starlette.requests import ClientDisconnect, Request

from federation.node.heavy import HEAVY_BYTES, HeavyWork
from federation.node.refusals import FrameworkRefusal, Refusal, try_later

BODY_TIMEOUT = timedelta(seconds=15)
SMALL_MEMORY_BYTES: Final = 12 * 1024 * 1024
LARGE_MEMORY_BYTES: Final = 16 * 1024 * 1024
BODY_WEIGHT: Final = 8
"""How many times its length a body takes while it is worked on: itself, its members, the ciphertext, the plaintext as
bytes and as text, the activity, and what goes to the database."""
DISCARDED_BYTES = HEAVY_BYTES
"""How much of a refused body is read and dropped, so that the connection can be used again."""

# The rest of a refused body may still be on its way: the connection cannot be used again.
_CLOSE = {"Connection": "close"}


TooLarge: TypeAlias = Callable[[int], Refusal]
"""Makes the refusal of a body, given the limit in bytes."""


def framework_too_large(limit: int) -> Refusal:
    """Return the refusal that most endpoints use for a body that is too large."""
    return FrameworkRefusal(413, f"The body has more than {limit} bytes", code="PAYLOAD_TOO_LARGE", headers=_CLOSE)


Vouch: TypeAlias = Callable[[], Awaitable[None]]
"""Raises a `Refusal` if the name that a request gives does not allow a body over 64 KiB."""


async def _for_anybody() -> None:
    pass


@dataclass(slots=True)
class _Memory:
    """A budget of bytes, some of which are held."""

    most: int
    held: int = 0


@dataclass(slots=True)
class _Arriving:
    """A body, and how much it takes of which memory."""

    memory: _Memory
    body: bytearray = field(default_factory=bytearray)
    held: int = 0

    def take(self, amount: int) -> None:
        """Take that many more bytes.

        Raises:
            Refusal: 503, there are not as many.
        """
        self.held += amount
        self.memory.held += amount
        if self.memory.held > self.memory.most:
            raise try_later("Too many requests at once", reason="BODY_MEMORY")

    def leave(self) -> None:
        """Give everything back."""
        self.memory.held -= self.held
        self.held = 0

    def move(self, memory: _Memory) -> None:
        """Take the same amount from *memory* instead, from now on."""
        held = self.held
        self.leave()
        self.memory = memory
        self.take(held)


class BodyReader:
    """Reads request bodies.

    Small ones take at most *memory* bytes together, large ones at most *large* while they arrive. A body has *timeout*
    to arrive. A flood of large or slow bodies thus costs a known amount of memory, and the sender of a body that does
    not fit is told to come back.
    """

    def __init__(
        self,
        *,
        timeout: timedelta = BODY_TIMEOUT,
        memory: int = SMALL_MEMORY_BYTES,
        large: int = LARGE_MEMORY_BYTES,
        heavy: HeavyWork | None = None,
    ) -> None:
        self._timeout = timeout.total_seconds()
        self._small = _Memory(memory)
        self._large = _Memory(large)
        self._heavy = heavy or HeavyWork()

    @asynccontextmanager
    async def read(
        self,
        request: Request,
        *,
        limit: int,
        too_large: TooLarge = framework_too_large,
        vouch: Vouch = _for_anybody,
    ) -> AsyncIterator[bytearray]:
        """Read the whole body. Its memory counts as taken until the block ends.

        *vouch* is asked about a body over 64 KiB.

        Raises:
            Refusal: the one of *vouch*; the one of *too_large*, 413, over *limit* bytes; 408 too slow or cut off; 503
                no memory left.
        """
        arriving = _Arriving(self._small)
        try:
            await self._fill(arriving, request, limit, too_large, vouch)
            weight = BODY_WEIGHT * len(arriving.body)
            if arriving.memory is self._large:
                async with self._heavy.room(weight):
                    arriving.leave()
                    yield arriving.body
            else:
                arriving.take(weight - arriving.held)
                yield arriving.body
        finally:
            arriving.leave()

    async def discard(self, request: Request) -> bool:
        """Read and drop a short body. Return False if it is not short: then the connection cannot be used again."""
        if _announced(request) > DISCARDED_BYTES:
            return False
        received = 0
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(self._timeout):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > DISCARDED_BYTES:
                        return False
                return True
        return False

    async def _fill(self, arriving: _Arriving, request: Request, limit: int, too_large: TooLarge, vouch: Vouch) -> None:
        if _announced(request) > max(limit, DISCARDED_BYTES):
            raise too_large(limit)
        if _announced(request) > HEAVY_BYTES:
            await self._admit_large(arriving, _announced(request), vouch)
        received = 0
        try:
            async with asyncio.timeout(self._timeout):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > max(limit, DISCARDED_BYTES):
                        break
                    if received > HEAVY_BYTES and arriving.memory is self._small:
                        await self._admit_large(arriving, limit, vouch)
                    if received <= limit:
                        arriving.take(len(chunk))
                        arriving.body += chunk
        except TimeoutError:
            text = f"The body did not arrive within {self._timeout:g} seconds"
            raise FrameworkRefusal(408, text, code="REQUEST_TIMEOUT", headers=_CLOSE) from None
        except ClientDisconnect:
            raise FrameworkRefusal(408, "The body broke off", code="REQUEST_TIMEOUT", headers=_CLOSE) from None
        if received > limit:
            raise too_large(limit)

    async def _admit_large(self, arriving: _Arriving, size: int, vouch: Vouch) -> None:
        try:
            await vouch()
            await self._heavy.turn(size)
        except Refusal as refusal:
            refusal.headers = {**refusal.headers, **_CLOSE}
            raise
        arriving.move(self._large)


def _announced(request: Request) -> int:
    announced = request.headers.get("content-length", "")
    return int(announced[:20]) if announced.isdecimal() else 0
