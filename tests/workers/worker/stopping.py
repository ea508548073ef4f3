"""Workers that are stopped: run until they have ended, with handlers and storages that take their time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta

from workers.jobs import Claim, JobState
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.handlers import Job

HOUR = timedelta(hours=1)
NO_GRACE = timedelta(0)


@asynccontextmanager
async def run_to_the_end(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """The worker runs; the block stops it, and it must have ended soon after."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait([task])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Gate:
    """A handler that waits to be let through, and ends well."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        await self.open.wait()


class SlowClaims(MemoryStorage):
    """Claims reach the storage at once; their answers wait for `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        claims = await super().claim(worker_id, leases=leases, limit=limit)
        self.asked.set()
        await self.answer.wait()
        return claims


async def assert_released(storage: Storage, job_id: str) -> None:
    """The job is claimable now, and its attempt was not counted."""
    status = await steps.status(storage, job_id)
    assert (status.state, status.attempt) == (JobState.QUEUED, 0)
    claim = await steps.claim_one(storage)
    assert claim.job_id == job_id
