"""The reference storage: one process, no durability, every step taken from the transition table.

Queues of one `MemorySpace` share a clock. Storages on the same space and name share a queue.

For tests of your own handlers, for conformance, and for work that may be lost with the process. It serves one event
loop at a time and is not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import Final

from workers.checks import check_text
from workers.clock import Clock, ManualClock, SystemClock
from workers.jobs import (
    CancelResult,
    Claim,
    CronLook,
    CronRow,
    EnqueueResult,
    JobOutcome,
    JobRecord,
    JobRef,
    JobState,
    JobStatus,
    Moved,
    NewJob,
    Page,
    ProgressReport,
    Recovery,
    Renewal,
    Retention,
    Settlement,
    SettleOutcome,
    WorkerInfo,
)
from workers.limits import HeldBack, Limit
from workers.storage.base import Capabilities
from workers.storage.memory.dependents import DependentTable
from workers.storage.memory.steps import QueueSteps
from workers.storage.rules import refuse_other_queues, refuse_transaction
from workers.storage.subscribers import BufferedSubscription, HeldWakes, Subscribers


class MemoryStorage:
    """One queue in a space; without `space` it has one of its own, with the given clock.

    With a `ManualClock`, `wait` wakes for delayed jobs when the clock is advanced; its timeout is real time.
    """

    capabilities: Final = Capabilities(
        clock="machine",
        durable=False,
        processes="one",
        delay_resolution=timedelta(0),
        limit_keys=True,
        crons=True,
        farewells=True,
        ordered_listing=True,
        outside_continuations=True,
        held_wake_ups=True,
    )

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        if space is not None and clock is not None:
            raise ValueError("a space has its own clock: MemoryStorage(MemorySpace(clock))")
        check_text("queue name", queue)
        self._space = space or MemorySpace(clock)
        self._name = queue
        self._queue = self._space.queue(queue)
        self._held_wakes = HeldWakes()

    def __repr__(self) -> str:
        return f"MemoryStorage(queue={self._name!r})"

    @property
    def queue(self) -> str:
        return self._name

    async def connect(self) -> None:
        """Do nothing: the space lives as long as something refers to it."""

    async def disconnect(self) -> None:
        """Do nothing: there is nothing to close."""

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        refuse_transaction(connection, "MemoryStorage")
        refuse_other_queues(jobs, "MemoryStorage")
        with self._queue.quiet() if self._held_wakes.held(jobs) else nullcontext():
            return self._queue.enqueue(jobs, self._now())

    def with_notify(self, connection: object | None = None) -> AbstractAsyncContextManager[None]:
        """See `HoldsWakeUps.with_notify`."""
        refuse_transaction(connection, "MemoryStorage")
        return self._held_wakes.hold(self._wake)

    async def _wake(self, _: Collection[str]) -> None:
        self._queue.wake()

    async def crons(self, *, due: bool = False) -> CronLook:
        return self._queue.crons(due, self._now())

    async def replace_cron(self, row: CronRow, *, jobs: Sequence[NewJob] = ()) -> bool:
        return self._queue.replace_cron(row, jobs, self._now())

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        return self._queue.claim(worker_id, leases, limit, self._now())

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout.total_seconds()
        await asyncio.sleep(0)  # a caller that always finds work must not starve the loop
        while (until_due := self._queue.claimable_in(names, self._now())) != timedelta(0):
            left = deadline - clock()
            if left <= 0:
                return
            if until_due is not None and not isinstance(self._space.clock, ManualClock):
                left = min(left, until_due.total_seconds())
            await self._queue.sleep(left)

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        return self._queue.renew(claims, self._now())

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        refuse_transaction(connection, "MemoryStorage")
        return self._queue.settle(settlements, self._now())

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        self._queue.progress(reports, self._now())

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        return self._queue.recover(limit, max_stalls, self._now())

    async def sweep(self, limit: int) -> int:
        return self._queue.sweep(limit, self._now())

    async def farewell(self, worker_id: str) -> None:
        self._queue.farewell(worker_id)

    async def cancel(self, job_id: str) -> CancelResult:
        return self._queue.cancel(job_id, self._now())

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        return self._queue.status(ids, self._now())

    async def read(self, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._queue.read(ids, self._now())

    async def result(self, job_id: str) -> JobOutcome | None:
        return self._queue.result(job_id, self._now())

    async def counts(self) -> dict[JobState, int]:
        return self._queue.counts(self._now())

    async def waiting_since(self) -> datetime | None:
        return self._queue.waiting_since(self._now())

    async def workers(self) -> list[WorkerInfo]:
        return self._queue.workers()

    async def pause(self) -> None:
        self._queue.pause(True)

    async def resume(self) -> None:
        self._queue.pause(False)

    async def is_paused(self) -> bool:
        return self._queue.paused

    async def retry(self, ids: Sequence[str]) -> Moved:
        return self._queue.retry(ids, self._now())

    async def remove(self, ids: Sequence[str], *, running: bool = False, connection: object | None = None) -> int:
        refuse_transaction(connection, "MemoryStorage")
        return self._queue.remove(ids, running, self._now())

    async def complete(
        self, job_id: str, result: bytes, *, keep: Retention | None = None, connection: object | None = None
    ) -> JobState | None:
        refuse_transaction(connection, "MemoryStorage")
        return self._queue.complete(job_id, result, keep, self._now())

    async def continue_job(self, then: NewJob, *, connection: object | None = None) -> JobState | None:
        refuse_transaction(connection, "MemoryStorage")
        return self._queue.continue_job(then, self._now())

    async def promote(self, ids: Sequence[str]) -> int:
        return self._queue.promote(ids, self._now())

    async def drain(self) -> int:
        return self._queue.drain(self._now())

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        return self._queue.clean(state, older_than, limit, self._now())

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        return self._queue.update_result_ttl(job_id, ttl, self._now())

    async def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        self._queue.declare_limits(limits)

    async def declared_limits(self) -> dict[str, Limit]:
        return self._queue.declared_limits()

    async def remove_limit(self, name: str) -> bool:
        return self._queue.remove_limit(name)

    async def followed(self, job_id: str) -> list[JobRef]:
        return [JobRef(self.queue, one) for one in self._queue.table.followed(job_id)]

    async def followers(self, job_id: str, *, limit: int = 1_000) -> list[JobRef]:
        return [JobRef(self.queue, one) for one in self._queue.table.followers(job_id, limit)]

    async def outcomes(self, job_id: str) -> dict[JobRef, JobOutcome | None]:
        found = self._queue.outcomes(job_id, self._now())
        return {JobRef(self.queue, one): outcome for one, outcome in found.items()}

    async def held_back(self, ids: Sequence[str]) -> list[HeldBack | None]:
        return self._queue.held_back(ids, self._now())

    @asynccontextmanager
    async def events(self) -> AsyncIterator[BufferedSubscription]:
        with self._queue.listening.everything() as subscription:
            yield subscription

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        with self._queue.listening.cancel_requests() as subscription:
            yield subscription

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[BufferedSubscription]:
        with self._queue.listening.of_job(job_id) as subscription:
            yield subscription

    def _now(self) -> datetime:
        return self._space.clock.now()

    # Last, because from here on `list` is this method and no longer the type.
    async def list_in_order(
        self, state: JobState, *, name: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page:
        return self._queue.page(state, name, cursor, limit, self._now())

    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self.list_in_order(state, cursor=cursor, limit=limit)


class MemoryQueue(QueueSteps):
    """One queue's jobs, and those who wait for them."""

    def __init__(self) -> None:
        self.listening = Subscribers()
        super().__init__(DependentTable(self.listening, self.wake))
        self._sleepers: dict[asyncio.Future[None], None] = {}  # first come, first woken
        self._quiet = False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Wake nobody in the block, which is one step of the event loop."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def wake(self) -> None:
        if self._quiet:
            return
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    async def sleep(self, seconds: float | None) -> None:
        """Wait until woken, for at most `seconds`."""
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers[sleeper] = None
        try:
            await asyncio.wait([sleeper], timeout=seconds)
        finally:
            del self._sleepers[sleeper]


class MemorySpace:
    """The counterpart of a server: the queues that several `MemoryStorage` objects share, and their clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._queues: dict[str, MemoryQueue] = {}
        if isinstance(self.clock, ManualClock):
            self.clock.watch(self._wake)

    def queue(self, name: str) -> MemoryQueue:
        """Return the queue of this name, making it the first time."""
        return self._queues.setdefault(name, MemoryQueue())

    def _wake(self) -> None:
        for queue in self._queues.values():
            queue.wake()
