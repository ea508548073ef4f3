"""The reference storage: one process, no durability, every step taken from the transition table.

Queues of one `MemorySpace` share a clock. Storages on the same space and name share a queue.

For tests of your own handlers, for conformance, and for work that may be lost with the process. It serves one event
loop at a time and is not thread-safe.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import TypeVar

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

T = TypeVar("T")


class StepStorage(ABC):
    """One queue whose every transition is a step of `QueueSteps`, wherever its jobs lie."""

    def __init__(self, queue: str) -> None:
        check_text("queue name", queue)
        self._name = queue
        self._held_wakes = HeldWakes()

    @abstractmethod
    async def _read(self, step: Callable[[QueueSteps, datetime], T]) -> T:
        """Return what a step finds at the time of the clock; it changes nothing, except what the clock changes."""

    @abstractmethod
    async def _write(self, step: Callable[[QueueSteps, datetime], T], *, quiet: bool = False) -> T:
        """Return what a step answers, once what it changed is as safe as it gets; with `quiet` nobody is woken."""

    @abstractmethod
    def _wake(self) -> None:
        """Wake those who wait."""

    @property
    def queue(self) -> str:
        return self._name

    # Jobs

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        self._refuse_transaction(connection)
        refuse_other_queues(jobs, type(self).__name__)
        quiet = self._held_wakes.held(jobs)
        return await self._write(lambda state, now: state.enqueue(jobs, now), quiet=quiet)

    def with_notify(self, connection: object | None = None) -> AbstractAsyncContextManager[None]:
        """See `HoldsWakeUps.with_notify`."""
        self._refuse_transaction(connection)
        return self._held_wakes.hold(self._wake_for)

    async def _wake_for(self, _: Collection[str]) -> None:
        self._wake()

    def _refuse_transaction(self, connection: object | None) -> None:
        refuse_transaction(connection, type(self).__name__)

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        return await self._write(lambda state, now: state.claim(worker_id, leases, limit, now))

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        return await self._write(lambda state, now: state.renew(claims, now)) if claims else Renewal()

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        self._refuse_transaction(connection)
        return await self._write(lambda state, now: state.settle(settlements, now)) if settlements else []

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        await self._write(lambda state, now: state.progress(reports, now))

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        return await self._write(lambda state, now: state.recover(limit, max_stalls, now))

    async def sweep(self, limit: int) -> int:
        return await self._write(lambda state, now: state.sweep(limit, now))

    async def farewell(self, worker_id: str) -> None:
        await self._write(lambda state, now: state.farewell(worker_id))

    async def cancel(self, job_id: str) -> CancelResult:
        return await self._write(lambda state, now: state.cancel(job_id, now))

    # Reading

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        return await self._read(lambda state, now: state.status(ids, now))

    async def read(self, ids: Sequence[str]) -> list[JobRecord | None]:
        return await self._read(lambda state, now: state.read(ids, now))

    async def result(self, job_id: str) -> JobOutcome | None:
        return await self._read(lambda state, now: state.result(job_id, now))

    async def counts(self) -> dict[JobState, int]:
        return await self._read(lambda state, now: state.counts(now))

    async def waiting_since(self) -> datetime | None:
        return await self._read(lambda state, now: state.waiting_since(now))

    async def workers(self) -> list[WorkerInfo]:
        return await self._read(lambda state, now: state.workers())

    # Management

    async def pause(self) -> None:
        await self._write(lambda state, now: state.pause(True))

    async def resume(self) -> None:
        await self._write(lambda state, now: state.pause(False))

    async def is_paused(self) -> bool:
        return await self._read(lambda state, now: state.paused)

    async def retry(self, ids: Sequence[str]) -> Moved:
        return await self._write(lambda state, now: state.retry(ids, now))

    async def remove(self, ids: Sequence[str], *, running: bool = False, connection: object | None = None) -> int:
        self._refuse_transaction(connection)
        return await self._write(lambda state, now: state.remove(ids, running, now))

    async def complete(
        self, job_id: str, result: bytes, *, keep: Retention | None = None, connection: object | None = None
    ) -> JobState | None:
        self._refuse_transaction(connection)
        return await self._write(lambda state, now: state.complete(job_id, result, keep, now))

    async def continue_job(self, then: NewJob, *, connection: object | None = None) -> JobState | None:
        self._refuse_transaction(connection)
        return await self._write(lambda state, now: state.continue_job(then, now))

    async def promote(self, ids: Sequence[str]) -> int:
        return await self._write(lambda state, now: state.promote(ids, now))

    async def drain(self) -> int:
        return await self._write(lambda state, now: state.drain(now))

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        return await self._write(lambda jobs, now: jobs.clean(state, older_than, limit, now))

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        return await self._write(lambda state, now: state.update_result_ttl(job_id, ttl, now))

    # Limits, and what recurs

    async def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        await self._write(lambda state, now: state.declare_limits(limits))

    async def declared_limits(self) -> dict[str, Limit]:
        return await self._read(lambda state, now: state.declared_limits())

    async def remove_limit(self, name: str) -> bool:
        return await self._write(lambda state, now: state.remove_limit(name))

    async def followed(self, job_id: str) -> list[JobRef]:
        return [JobRef(self.queue, one) for one in await self._read(lambda state, _: state.table.followed(job_id))]

    async def followers(self, job_id: str, *, limit: int = 1_000) -> list[JobRef]:
        found = await self._read(lambda state, now: state.table.followers(job_id, limit))
        return [JobRef(self.queue, one) for one in found]

    async def outcomes(self, job_id: str) -> dict[JobRef, JobOutcome | None]:
        found = await self._read(lambda state, now: state.outcomes(job_id, now))
        return {JobRef(self.queue, one): outcome for one, outcome in found.items()}

    async def held_back(self, ids: Sequence[str]) -> list[HeldBack | None]:
        return await self._read(lambda state, now: state.held_back(ids, now))

    async def crons(self, *, due: bool = False) -> CronLook:
        return await self._read(lambda state, now: state.crons(due, now))

    async def replace_cron(self, row: CronRow, *, jobs: Sequence[NewJob] = ()) -> bool:
        refuse_other_queues(jobs, type(self).__name__)
        return await self._write(lambda state, now: state.replace_cron(row, jobs, now))

    # Last, because from here on `list` is this method and no longer the type.
    async def list_in_order(
        self, state: JobState, *, name: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page:
        return await self._read(lambda jobs, now: jobs.page(state, name, cursor, limit, now))

    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self.list_in_order(state, cursor=cursor, limit=limit)


class MemoryStorage(StepStorage):
    """One queue in a space; without `space` it has one of its own, with the given clock.

    With a `ManualClock`, `wait` wakes for delayed jobs when the clock is advanced; its timeout is real time.
    """

    capabilities: Capabilities = Capabilities(
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
        super().__init__(queue)
        self._space = space or MemorySpace(clock)
        self._queue = self._space.queue(queue)

    def __repr__(self) -> str:
        return f"MemoryStorage(queue={self._name!r})"

    async def connect(self) -> None:
        """Do nothing: the space lives as long as something refers to it."""

    async def disconnect(self) -> None:
        """Do nothing: there is nothing to close."""

    async def _read(self, step: Callable[[QueueSteps, datetime], T]) -> T:
        return step(self._queue, self._space.clock.now())

    async def _write(self, step: Callable[[QueueSteps, datetime], T], *, quiet: bool = False) -> T:
        with self._queue.quiet() if quiet else nullcontext():
            return step(self._queue, self._space.clock.now())

    def _wake(self) -> None:
        self._queue.wake()

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout.total_seconds()
        await asyncio.sleep(0)  # a caller that always finds work must not starve the loop
        while (until_due := self._queue.claimable_in(names, self._space.clock.now())) != timedelta(0):
            left = deadline - clock()
            if left <= 0:
                return
            if until_due is not None and not isinstance(self._space.clock, ManualClock):
                left = min(left, until_due.total_seconds())
            await self._queue.sleep(left)

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
