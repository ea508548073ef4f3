"""Tasks in a test: kept in memory, and run by a real worker when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from workers.jobs import JobState, JobStatus
from workers.queue import Queue
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.worker import Worker, WorkerOptions
from workers.worker.draining import run_while
from workers.worker.events import WorkerEvent, WorkerEventKind
from workers.worker.handlers import Handler

_DUE: Final = (JobState.QUEUED, JobState.PROCESSING, JobState.FAILING)
_ALL: Final = (*_DUE, JobState.SCHEDULED)
_LISTED: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How many jobs completed, and the last exception of each that failed."""

    completed: int
    errors: tuple[BaseException, ...]


class InMemory:
    """What was enqueued in a block of `Tasks.in_memory`, and what runs it."""

    def __init__(self, queue: Queue, handlers: Callable[[], Mapping[str, Handler]], *, eager: bool) -> None:
        self.queue = queue
        """The queue in memory, to be asked about its jobs."""
        self._handlers = handlers
        self._eager = eager
        self.is_draining = False
        """Whether tasks run at this moment."""

    async def drain(self, *, delayed: bool = False, raises: bool = True) -> Drained:
        """Run what is enqueued, and what that enqueues, until nothing is left; `delayed` jobs too, before their time.

        What failed is run again at once, as often as it has attempts.

        Raises:
            ExceptionGroup: what made jobs fail for good, unless told not to raise.
        """
        self.is_draining = True
        try:
            drained = await _drain(self.queue, self._handlers(), _ALL if delayed else _DUE)
        finally:
            self.is_draining = False
        if raises and drained.errors:
            raise BaseExceptionGroup("tasks failed", drained.errors)
        return drained

    async def jobs(self) -> list[JobStatus]:
        """Return what is enqueued and has not run yet."""
        states = (*_ALL, JobState.WAITING)
        pages = [await self.queue.manage.list(state, limit=_LISTED) for state in states]
        return sorted((job for page in pages for job in page.jobs), key=lambda job: job.created_at)

    async def note_enqueue(self) -> None:
        """Run what was enqueued, if that is to happen at once; what a running task enqueues runs after it."""
        if self._eager and not self.is_draining:
            await self.drain()


def queue_in_memory() -> Queue:
    """Return a queue that nobody else has."""
    return Queue(MemoryStorage(MemorySpace()))


async def _drain(queue: Queue, handlers: Mapping[str, Handler], states: tuple[JobState, ...]) -> Drained:
    completed, errors, changed = 0, list[BaseException](), asyncio.Event()

    def observe(event: WorkerEvent) -> None:
        nonlocal completed
        completed += event.kind is WorkerEventKind.COMPLETED
        if event.kind is WorkerEventKind.FAILED and event.error is not None:
            errors.append(event.error)
        changed.set()

    if not await _left(queue, states):
        return Drained(completed=0, errors=())
    worker = Worker(
        queue.storage, handlers, concurrency=1, observers=[observe], options=WorkerOptions(grace=timedelta(0))
    )
    await run_while(worker, partial(_left, queue, states), changed)
    return Drained(completed=completed, errors=tuple(errors))


async def _left(queue: Queue, states: tuple[JobState, ...]) -> int:
    """Let jobs that wait for a time run now, and return how many jobs are left."""
    for state in {JobState.FAILING, JobState.SCHEDULED} & set(states):
        waiting = await queue.manage.list(state, limit=_LISTED)
        await queue.manage.promote([job.id for job in waiting.jobs])
    counts = await queue.counts()
    return sum(counts[state] for state in states)
