"""A storage whose inner steps can be overridden, to be wrong in one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from workers.clock import Clock
from workers.jobs import (
    Claim,
    EnqueueResult,
    NewJob,
    Retried,
    Settlement,
    SettleOutcome,
)
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.storage.memory.jobs import JobTable, StoredJob
from workers.storage.memory.line import KeyHolder
from workers.storage.memory.storage import MemoryQueue


async def elsewhere() -> None:
    """Another client's turn, as between two round trips."""
    await asyncio.sleep(0)


class Fallible(MemoryStorage):
    """A storage in memory whose inner steps can be overridden, to be wrong in one of them."""

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        for step in ("_settle", "_grant", "_enqueue", "_retry"):
            setattr(self._queue, step, getattr(self, step))

    def _now(self) -> datetime:
        return self._space.clock.now()

    @property
    def _table(self) -> JobTable:
        return self._queue.table

    def _claimable(self, names: Collection[str]) -> bool:
        return self._queue.claimable_in(names, self._now()) == timedelta(0)

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        return MemoryQueue._settle(self._queue, settlement, now)

    def _grant(self, job: StoredJob, worker_id: str, leases: Mapping[str, timedelta], now: datetime) -> Claim:
        return MemoryQueue._grant(self._queue, job, worker_id, leases, now)

    def _enqueue(self, new: NewJob, groups: dict[str, KeyHolder | None], now: datetime) -> EnqueueResult:
        return MemoryQueue._enqueue(self._queue, new, groups, now)

    def _retry(self, job: StoredJob, settlement: Retried, now: datetime) -> None:
        MemoryQueue._retry(self._queue, job, settlement, now)
