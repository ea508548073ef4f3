"""Several processes on one directory: no job goes to two of them, and each hears of the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.workers.storage.file.steps import LEASES, child, go, killed_at_the_end, line
from workers.jobs import JobEventKind
from workers.storage.file import FileStorage
from workers.testing.faults import counting
from workers.testing.steps import PATIENCE, background, job, next_claim, until


async def test_racing_processes_share_no_job(storage: FileStorage, tmp_path: Path) -> None:
    """Three processes claim at once: every job goes to exactly one of them."""
    await storage.enqueue([job(f"job-{number}") for number in range(300)])
    children = [child("race", tmp_path) for _ in range(2)]
    with killed_at_the_end(*children):
        for process in children:
            assert await line(process) == "ready"
        for process in children:
            go(process)
        claimed: list[str] = []
        while claims := await storage.claim("parent", leases=LEASES, limit=7):
            claimed += [claim.job_id for claim in claims]
        for process in children:
            claimed += process.communicate()[0].split()
    assert sorted(claimed) == sorted(f"job-{number}" for number in range(300))


async def test_another_processs_enqueue_wakes(storage: FileStorage, tmp_path: Path) -> None:
    """A worker asleep gets a job that another process enqueues."""
    process = child("enqueue", tmp_path)
    with killed_at_the_end(process):
        assert await line(process) == "ready"
        watched, calls = counting(storage)
        worker = asyncio.create_task(next_claim(watched))
        async with background(worker):
            await until(lambda: calls["wait"])
            go(process)
            claim = await worker
    assert claim.job_id == "from the child"


async def test_another_processs_completion_is_heard(storage: FileStorage, tmp_path: Path) -> None:
    """A subscriber hears what another process does with the job, and finds the result."""
    await storage.enqueue([job("a")])
    process = child("complete", tmp_path)
    with killed_at_the_end(process):
        assert await line(process) == "ready"
        async with asyncio.timeout(3 * PATIENCE), storage.subscribe("a") as subscription:
            go(process)
            assert [(await subscription.get()).kind for _ in range(2)] == [JobEventKind.ACTIVE, JobEventKind.COMPLETED]
        outcome = await storage.result("a")
    assert outcome is not None
    assert outcome.result == b"from the child"
