"""The work that large bodies cause: admitted by weight, and done in a thread of its own.

Theory of operation. What blocks the event loop blocks every other request and all deliveries of the process, and a body
takes several times its memory while it is worked on. So heavy work waits until there is room, in the order in which it
came; if it needs more room than there is, it gets all of it.

A thread does not have a processor of its own, and reading a body is as much work again. So only a limited number of
bytes per second are let in, and the sender of a body that would have to wait long is told to come back before it is
read. Somebody who writes a registered server's name can use that up, and make large bodies wait; nobody else notices.
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
"""Bodies larger than this are heavy."""
HEAVY_MEMORY_BYTES: Final = 32 * 1024 * 1024
HEAVY_BYTES_PER_SECOND: Final = 8 * 1024 * 1024
PATIENCE: Final = timedelta(seconds=5)
"""How long heavy work waits for its turn, and then for room. Its sender waits 15 s for an answer."""

T = TypeVar("T")


class HeavyWork:
    """Heavy work of one process: it takes at most *memory* bytes at a time, and reads *rate* bytes per second."""

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
        """Wait until a body of *size* may be read.

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
        """Take *weight* bytes until the block ends.

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
        """Run *work* in the thread, after all earlier work, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _too_many() -> Refusal:
    return try_later("Too many large requests at once", reason="BODY_MEMORY")
