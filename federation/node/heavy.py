"""The work that large bodies make: admitted by weight, and done in a thread of its own.

Theory of operation. What holds up the event loop holds up every other request and all deliveries of the process, and
what is being worked on takes several times the memory that it took on its way in. So it waits until there is room, in
the order it came; whoever needs more room than there is gets all of it.

A thread has no processor of its own, and to read a body is as much work again. So only so many bytes a second are let
in, and what would have to wait for long is told to come back before it is read. Whoever writes a registered server's
name can use that up, and have large bodies wait; nobody else notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from time import monotonic
from typing import Final, TypeVar

from federation.node.refusals import Refusal, try_later

HEAVY_BYTES: Final = 64 * 1024
"""Bodies over this are heavy."""
HEAVY_MEMORY_BYTES: Final = 32 * 1024 * 1024
HEAVY_BYTES_PER_SECOND: Final = 8 * 1024 * 1024
PATIENCE: Final = timedelta(seconds=5)
"""How long heavy work waits for its turn, and again for room: its sender waits 15 s for an answer."""

T = TypeVar("T")


class HeavyWork:
    """Heavy work of one process, which takes at most *memory* bytes together, of bodies that come at most at *rate*."""

    def __init__(
        self,
        *,
        memory: int = HEAVY_MEMORY_BYTES,
        rate: int = HEAVY_BYTES_PER_SECOND,
        patience: timedelta = PATIENCE,
    ) -> None:
        self._memory = memory
        self._rate = rate
        self._let_in_until = 0.0
        self._free = memory
        self._patience = patience.total_seconds()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heavy-bodies")

    async def turn(self, size: int) -> None:
        """A body of *size* may be read now.

        Raises:
            Refusal: 503, that would be too late.
        """
        now = monotonic()
        at = max(self._let_in_until, now)
        if at - now > self._patience:
            raise _too_many()
        self._let_in_until = at + size / self._rate
        await asyncio.sleep(at - now)

    @asynccontextmanager
    async def room(self, weight: int) -> AsyncIterator[None]:
        """So many bytes are taken until the block ends.

        Raises:
            Refusal: 503, there was no room in time.
        """
        taken = min(weight, self._memory)
        try:
            async with asyncio.timeout(self._patience), self._turn:
                while self._free < taken:
                    self._freed.clear()
                    await self._freed.wait()
                self._free -= taken
        except TimeoutError:
            raise _too_many() from None
        try:
            yield
        finally:
            self._free += taken
            self._freed.set()

    async def run(self, work: Callable[[], T]) -> T:
        """What *work* returns, or raises, after what was to be done before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _too_many() -> Refusal:
    return try_later("Too many large requests at once", reason="BODY_MEMORY")
