"""Runs workers in tests: started and stopped around a block, and watched through their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from workers.jobs import JobOutcome
from workers.retry import RetryPolicy
from workers.storage.base import Storage
from workers.testing.faults import Faults
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.events import WorkerEvent, WorkerEventKind
from workers.worker.handlers import Job

AT_ONCE = RetryPolicy(initial=timedelta(0), jitter=0)
NEVER = RetryPolicy(initial=timedelta(hours=1), maximum=timedelta(hours=1), jitter=0)
LEASE = timedelta(seconds=2)
"""Short, but two thirds of it are left at each renewal: longer than a busy machine stalls."""


class Recorder:
    """An observer that keeps every event, and lets a test wait for them."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, event: WorkerEvent) -> None:
        self.events.append(event)
        self._changed.set()

    def of(self, kind: WorkerEventKind) -> list[WorkerEvent]:
        """The events of this kind so far."""
        return [event for event in self.events if event.kind is kind]

    def story(self, job_id: str | None = None) -> list[WorkerEventKind]:
        """The kinds of all events so far, or of those of one job."""
        return [event.kind for event in self.events if job_id is None or (event.claim and event.claim.job_id == job_id)]

    async def seen(self, kind: WorkerEventKind, count: int = 1) -> WorkerEvent:
        """The last of the first `count` events of this kind, as soon as it is there."""
        async with asyncio.timeout(PATIENCE):
            while len(found := self.of(kind)) < count:
                self._changed.clear()
                await self._changed.wait()
        return found[count - 1]


@asynccontextmanager
async def running(*workers: Worker) -> AsyncIterator[None]:
    """The workers run beside the block, and have stopped without grace when it ends."""
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
            worker.stop()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)


async def outcome(storage: Storage, job_id: str) -> JobOutcome:
    """How the job ended, as soon as it has."""
    async with asyncio.timeout(PATIENCE), storage.subscribe(job_id) as events:
        while (ended := await storage.result(job_id)) is None:
            await events.get()
    return ended


def broken(faults: Faults, verb: str, *, down: bool = True) -> None:
    """Every call of this verb fails from now on, or none does any more."""
    faults.requests_lost[verb] = 1_000_000 if down else 0


async def forever(job: Job) -> None:
    """A handler that ends only when it is cancelled."""
    await asyncio.Event().wait()


async def done(job: Job) -> None:
    """A handler that completes at once."""


class Crowd:
    """A handler that counts how many of it run at once, and lets nobody go before `open`."""

    def __init__(self) -> None:
        self.inside = 0
        self.peak = 0
        self.runs: list[str] = []
        self.open = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        self.runs.append(job.id)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        await self.open.wait()
        self.inside -= 1
