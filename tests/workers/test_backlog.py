"""Crashed workers' jobs come back under a backlog that never ends, on every storage, though the reaper is restarted."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from tests.workers.harnesses import HARNESSES, OpenHarness
from tests.workers.running import outcome, running
from workers import WorkerOptions
from workers.jobs import OutcomeKind
from workers.storage.base import Storage
from workers.testing import all_cases
from workers.testing.steps import PATIENCE, claim, enqueue, job
from workers.worker import Worker
from workers.worker.handlers import Job

LIFE_SECONDS = 0.2
"""How long a worker lives: what is lost comes back over several of their lives."""
SHORT = timedelta(milliseconds=150)
LOST = [f"lost-{number}" for number in range(20)]
PLAIN = next(case for case in all_cases() if not case.needs)


async def keep_full(storage: Storage) -> None:
    """There is always more to do."""
    while True:
        await storage.enqueue([job() for _ in range(50)])
        while (await storage.counts())["queued"] > 50:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("open_harness", HARNESSES.values(), ids=HARNESSES.keys())
async def test_lost_jobs_come_back_under_a_backlog(open_harness: OpenHarness, request: pytest.FixtureRequest) -> None:
    """Jobs of a worker that vanished run, though the queue is never empty and workers and reapers end early."""
    async with open_harness(PLAIN, request) as harness:
        storage = await harness.open()
        await enqueue(storage, *(job(name, max_attempts=100) for name in LOST))
        assert len(await claim(storage, len(LOST), lease=SHORT)) == len(LOST)

        async def work(job: Job) -> None:
            await asyncio.sleep(0)

        filling = asyncio.create_task(keep_full(storage))
        try:
            async with asyncio.timeout(6 * PATIENCE):
                while any([await storage.result(name) is None for name in LOST]):
                    async with running(
                        Worker(storage, {"*": work}, concurrency=5, lease=SHORT, options=WorkerOptions(max_stalls=100))
                    ):
                        await asyncio.sleep(LIFE_SECONDS)
                    await harness.advance(SHORT)
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
        assert {(await outcome(storage, name)).kind for name in LOST} == {OutcomeKind.COMPLETED}
