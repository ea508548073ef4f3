"""A queue worked off by a real worker: what is due now, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from workers import Handler, JobState, Queue, RetryPolicy, Worker
from workers.clock import Clock
from workers.storage.base import Storage
from workers.worker.draining import run_while
from workers.worker.events import Observer, WorkerEvent, WorkerEventKind
from workers.worker.options import WorkerOptions

UNDER_WAY: Final = (JobState.QUEUED, JobState.PROCESSING)
LATER: Final = (JobState.FAILING, JobState.SCHEDULED)
MOST_LISTED: Final = 1_000


async def drain(
    queue: Queue,
    storage: Storage,
    handlers: Mapping[str, Handler],
    *,
    clock: Clock,
    concurrency: int,
    retry: RetryPolicy | None = None,
    observers: Sequence[Observer] = (),
) -> int:
    """Run the jobs that are due, and those that they enqueue, until none is. Return how many attempts that took."""
    await queue.start()
    if not await _is_due(queue, clock):
        return 0
    attempts, changed = 0, asyncio.Event()

    def observe(event: WorkerEvent) -> None:
        nonlocal attempts
        attempts += event.kind is WorkerEventKind.ACTIVE
        changed.set()

    worker = Worker(
        storage,
        handlers,
        concurrency=concurrency,
        observers=[observe, *observers],
        options=WorkerOptions(grace=timedelta(0), retry=retry),
    )
    await run_while(worker, partial(_is_due, queue, clock), changed)
    return attempts


async def next_due(queue: Queue) -> datetime | None:
    """Return when the first of the jobs that wait for their time is due; None if there is none."""
    await queue.start()
    counts = await queue.counts()
    pages = [await queue.manage.list(state, limit=MOST_LISTED) for state in LATER if counts[state]]
    times = [job.next_run_at for page in pages for job in page.jobs if job.next_run_at is not None]
    return min(times, default=None)


async def _is_due(queue: Queue, clock: Clock) -> bool:
    counts = await queue.counts()
    if any(counts[state] for state in UNDER_WAY):
        return True
    first = await next_due(queue)
    return first is not None and first <= clock.now()
