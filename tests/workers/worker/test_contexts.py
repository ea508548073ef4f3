"""The context variables of an attempt: those of the worker, and none of another attempt's."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Final

from tests.workers.running import outcome, running
from workers import Job
from workers.testing import Harness, steps
from workers.worker import Worker

JOBS: Final = 60
tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


async def test_what_a_handler_sets_is_gone_with_its_attempt(harness: Harness) -> None:
    """On each storage, under load, when a worker ends jobs and begins others in one step."""
    storage, seen = await harness.open(), list[str]()

    async def work(job: Job) -> None:
        seen.append(tenant.get())
        tenant.set(job.id)
        await asyncio.sleep(0)
        assert tenant.get() == job.id

    def plainly(job: Job) -> None:
        seen.append(tenant.get())
        tenant.set(job.id)

    jobs = [steps.job(f"job-{number}", name=("work", "plainly")[number % 2]) for number in range(JOBS)]
    await steps.enqueue(storage, *jobs)
    token = tenant.set("the worker's")
    try:
        async with running(Worker(storage, {"work": work, "plainly": plainly}, concurrency=4)):
            tenant.set("whoever waits")
            for job in jobs:
                assert (await outcome(storage, job.id)).error is None
    finally:
        tenant.reset(token)
    assert seen == ["the worker's"] * JOBS
