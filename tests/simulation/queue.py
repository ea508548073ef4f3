"""Queues that outlive the processes which use them, as Redis does, and that may be away."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Final, cast

from federation.base.queues.queue import ACTIVITIES_QUEUE_NAME, DELIVERY_QUEUE_NAME, TASKS_QUEUE_NAME
from tests.simulation.database import Line
from tests.simulation.loop import LoopClock
from workers import StorageUnavailable
from workers.jobs import JobState
from workers.storage.base import Storage
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.storage.memory.dependents import DependentTable
from workers.storage.memory.storage import MemoryQueue
from workers.testing.stand_in import StandIn

_FOREVER: Final = timedelta(days=30)
_OF_DELIVERIES: Final = (DELIVERY_QUEUE_NAME, ACTIVITIES_QUEUE_NAME)
_WAITING: Final = (JobState.QUEUED, JobState.SCHEDULED, JobState.FAILING)


class Queues:
    """All queues of one simulation."""

    def __init__(self, clock: LoopClock) -> None:
        self.space = MemorySpace(clock)
        self.waits: list[asyncio.Future[None]] = []
        """Of whoever waits for work."""
        self._clock = clock
        self._queues: dict[str, MemoryQueue] = {}

    def storage(self, name: str, line: Line) -> Storage:
        """The queue of that name, as a process sees it through its line."""
        self._queues[name] = self.space.queue(name)
        return cast("Storage", _Remote(MemoryStorage(self.space, name), line, self))

    def interrupt(self) -> None:
        """Who waits for work notices that nobody is there any more."""
        for each in self.waits:
            each.cancel()

    def lose(self) -> None:
        """All that the queues had is gone; who uses them notices nothing but that."""
        for queue in self._queues.values():
            queue.table = DependentTable(queue.listening, queue.wake)
            queue.seen.clear()
            queue.cron_rows.clear()
            queue.wake()

    def first_lease_end(self) -> float:
        """When the first job is free of whoever claimed it; infinite if none is claimed."""
        ends = [
            self._clock.loop_time(job.deadline)
            for queue in self._queues.values()
            for job in queue.table.by_state[JobState.PROCESSING].values()
            if job.deadline is not None
        ]
        return min(ends, default=float("inf"))

    def first_recurrence(self) -> float:
        """When the first of what recurs is due; infinite if nothing does."""
        dues = [row.due for queue in self._queues.values() for row in queue.cron_rows.values() if row.due is not None]
        return min(map(self._clock.loop_time, dues), default=float("inf"))

    def has_claims(self) -> bool:
        """Whether some worker is at work."""
        return any(queue.table.by_state[JobState.PROCESSING] for queue in self._queues.values())

    def has_task(self, job_id: str) -> bool:
        """Whether that task is there and has not ended."""
        table = self._queues[TASKS_QUEUE_NAME].table.by_state
        return any(job_id in table[state] for state in JobState if not state.is_final)

    def has_open(self, job_id: str) -> bool:
        """Whether that job of a delivery is there and has not ended."""
        tables = self._of_deliveries()
        return any(job_id in table[state] for table in tables for state in JobState if not state.is_final)

    def waiting(self) -> set[str]:
        """Ids of the jobs of deliveries that are there to be done."""
        return {job for table in self._of_deliveries() for state in _WAITING for job in table[state]}

    def _of_deliveries(self) -> list[Mapping[JobState, Mapping[str, object]]]:
        return [self._queues[name].table.by_state for name in _OF_DELIVERIES if name in self._queues]


class _Remote(StandIn):
    """Every verb fails while the line is cut."""

    def __init__(self, storage: MemoryStorage, line: Line, queues: Queues) -> None:
        super().__init__(storage)
        self._line = line
        self._queues = queues

    def __getattr__(self, verb: str) -> object:
        member = super().__getattr__(verb)
        if not inspect.iscoroutinefunction(member):
            return member

        async def call(*arguments: object, **named: object) -> object:
            self._require_answer()
            return await member(*arguments, **named)

        setattr(self, verb, call)  # looked up once
        return call

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        """Without the poll: that this queue wakes who waits is certain, and a week of polls is long."""
        self._require_answer()
        wait = asyncio.ensure_future(self._storage.wait(names, timeout=_FOREVER))
        self._queues.waits.append(wait)
        try:
            await asyncio.wait([wait])  # which `interrupt` may have ended
        finally:
            self._queues.waits.remove(wait)
            wait.cancel()
        self._require_answer()

    def _require_answer(self) -> None:
        if self._line.is_cut():
            raise StorageUnavailable("the simulated queue is away")
