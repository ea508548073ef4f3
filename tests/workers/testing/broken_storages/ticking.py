"""Storages that are wrong about limits, about which fair key is next, and about what recurs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tests.workers.testing.broken_storages.fallible import Fallible
from workers.clock import Clock
from workers.jobs import CronRow, NewJob, Recovery
from workers.storage.memory import MemorySpace
from workers.storage.memory.lines import StoredJob


class CronReplacedByAnybody(Fallible):
    """Replaces the row and enqueues the jobs, whatever the revision is."""

    async def replace_cron(self, row: CronRow, *, jobs: Sequence[NewJob] = ()) -> bool:
        self._queue.keep_cron(row)
        await self.enqueue(jobs)
        return True


class CronJobsOfTheLate(Fallible):
    """Enqueues the jobs in one step, and looks at the revision in the next."""

    async def replace_cron(self, row: CronRow, *, jobs: Sequence[NewJob] = ()) -> bool:
        await self.enqueue(jobs)
        return await super().replace_cron(row)


class TokenNotTaken(Fallible):
    """Looks whether the bucket has a token, and leaves it there."""

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        setattr(self._table.limits, "take_token", lambda key, now: None)  # noqa: B010 - mypy knows no other way


class PlaceOfTheLost(Fallible):
    """Keeps the place of a job whose lease expired, although it is recovered."""

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        limits = self._table.limits
        running = dict(limits._running)
        recovery = await super().recover(limit, max_stalls=max_stalls)
        limits._running.update(running)
        return recovery


class ParkedForgotten(Fallible):
    """Lets no parked job come up, whatever ends."""

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        setattr(self._table, "_unpark", lambda key: None)  # noqa: B010 - as above


class OpeningForgotten(Fallible):
    """Parks jobs until there is a token, and notes no time for it."""

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        setattr(self._table.limits, "open_later", lambda key, until: None)  # noqa: B010 - as above


class ChangedLimitUnseen(Fallible):
    """Keeps the jobs parked that the limit before kept back."""

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        setattr(self._table, "_look_again", lambda name: None)  # noqa: B010 - as above


class FairKeysInOrder(Fallible):
    """Lets the next job of a fair key keep the place that its enqueue gave it."""

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        setattr(self._table, "_bring_forward", self._bring_forward)  # noqa: B010 - as above

    def _bring_forward(self, job: StoredJob, key: str, now: datetime) -> None:
        self._table._step_out(job)
        self._table._line_up(job)
