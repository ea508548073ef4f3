"""What `MemoryStorage` objects share: queues in one process, on one clock."""

from __future__ import annotations

import asyncio

from workers.clock import Clock, ManualClock, SystemClock
from workers.storage.broadcast import Broadcast
from workers.storage.memory.jobs import JobTable
from workers.storage.memory.steps import QueueSteps


class MemoryQueue(QueueSteps):
    """One queue's jobs, and who waits for them."""

    def __init__(self) -> None:
        self.broadcast = Broadcast()
        super().__init__(JobTable(self.broadcast, self.wake))
        self._sleepers: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    async def sleep(self, seconds: float | None) -> None:
        """Return when woken, or after `seconds`."""
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.add(sleeper)
        try:
            await asyncio.wait([sleeper], timeout=seconds)
        finally:
            self._sleepers.discard(sleeper)


class MemorySpace:
    """What a server is to other storages: the queues that several `MemoryStorage` objects share, and their clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._queues: dict[str, MemoryQueue] = {}
        if isinstance(self.clock, ManualClock):
            self.clock.watch(self._wake)

    def queue(self, name: str) -> MemoryQueue:
        """The queue of this name, made when it is first asked for."""
        return self._queues.setdefault(name, MemoryQueue())

    def _wake(self) -> None:
        for queue in self._queues.values():
            queue.wake()
