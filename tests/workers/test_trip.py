"""How many of our files a job passes from its enqueue to its settlement, see "What a trip costs" in CONTRIBUTING.md."""

from __future__ import annotations

import pytest

import workers
from tests.trips import entered_files
from tests.workers.conftest import ORDINARY
from tests.workers.harnesses import HARNESSES
from workers import Job, Queue, Worker


@pytest.mark.parametrize(("name", "most"), [("memory", 32), ("sqlite", 46), ("postgres", 47)])
async def test_a_job_passes_few_files(name: str, most: int, request: pytest.FixtureRequest) -> None:
    """A file that a job passes anew raises the figure here and in CONTRIBUTING.md, or belongs to one that it passes."""
    async with HARNESSES[name](ORDINARY, request) as harness:
        storage = await harness.make("trip")

        async def handle(job: Job) -> None:
            worker.stop()

        worker = Worker(storage, {"job": handle})
        with entered_files(workers) as entered:
            await Queue(storage).enqueue({}, name="job")
            await worker.run()
    assert len(entered) <= most, sorted(entered)
