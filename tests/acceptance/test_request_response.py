"""Two processes talk through a queue: requests and their answers, and chains that go back and forth between them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest

from tests import warm
from tests.acceptance.chain_consumer import LEASE
from tests.patience import PATIENCE_SECONDS
from tests.workers.manual import ROOT
from workers import Job, JobFailedError, JobState, Queue, QueueOptions, continue_with
from workers.chains import Continuation
from workers.storage import open_storage
from workers.storage.sql import SqlStorage

PATIENCE: Final = timedelta(seconds=PATIENCE_SECONDS)


@pytest.fixture(params=["redis", "sqlite"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the queue is; on SQLite with its tables."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    file = f"sqlite:///{tmp_path}/queue.db"
    await SqlStorage(file).migrate()
    return file


@pytest.fixture
async def queue(url: str) -> AsyncIterator[Queue]:
    """This process's end of the queue, which serves the first and the third link of chains, and nothing else."""
    opened = Queue(open_storage(url, queue=f"talk-{uuid.uuid4().hex}"), options=QueueOptions(lease=LEASE))
    opened.execute({"first": first, "third": third})
    async with opened:
        yield opened


async def first(job: Job) -> Continuation:
    return continue_with("second", [f"first of {job.payload}"])


async def third(job: Job) -> object:
    assert isinstance(job.payload, list)
    return [*job.payload, "third"]


@asynccontextmanager
async def consumer(url: str, queue: Queue, *how: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The other process, at work; killed in the end."""
    process = await asyncio.create_subprocess_exec(
        *(warm.PYTHON, "-m", "tests.acceptance.chain_consumer", url, queue.storage.queue, *how),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await said(process, "ready")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process, word: str) -> None:
    """The next thing the process prints is this word."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert (await process.stdout.readline()).decode().strip() == word


async def test_a_request_is_answered_by_the_other_process(url: str, queue: Queue) -> None:
    """One at a time and many at once, each with its own answer; a failure is one too."""
    async with consumer(url, queue):
        assert await queue.enqueue_and_wait(21, name="double", timeout=PATIENCE) == 42
        many = (queue.enqueue_and_wait(number, name="double", timeout=PATIENCE) for number in range(50))
        assert await asyncio.gather(*many) == [number * 2 for number in range(50)]
        with pytest.raises(JobFailedError, match="AssertionError"):
            await queue.enqueue_and_wait("no number", name="double", timeout=PATIENCE, max_attempts=1)


async def test_a_chain_goes_back_and_forth(url: str, queue: Queue) -> None:
    """Its links run here, there and here, whoever waits for its end."""
    async with consumer(url, queue):
        await queue.start_job_chain("first", "letters", id="chain")
        result = await queue.wait_for_job_chain_completion("chain", PATIENCE)
        assert result == ["first of letters", "second, attempt 1", "third"]
        chains = [(await queue.start_job_chain("first", number)).id for number in range(20)]
        results = await asyncio.gather(*(queue.wait_for_job_chain_completion(each, PATIENCE) for each in chains))
    assert results == [[f"first of {number}", "second, attempt 1", "third"] for number in range(20)]
    chain = await queue.get_job_chain("chain")
    assert chain is not None
    assert (chain.state, chain.name, chain.index) == (JobState.COMPLETED, "third", 2)


async def test_a_chain_survives_the_process_in_its_middle(url: str, queue: Queue) -> None:
    """`kill -9` in the second link: the next process runs it again, and only it; who waited is told the end."""
    async with consumer(url, queue, "hold") as doomed:
        await queue.start_job_chain("first", "letters", id="chain")
        waiting = asyncio.create_task(queue.wait_for_job_chain_completion("chain", PATIENCE))
        await said(doomed, "holding")
        chain = await queue.get_job_chain("chain")
        assert chain is not None
        assert (chain.state, chain.name, chain.index) == (JobState.PROCESSING, "second", 1)
        doomed.kill()
        await doomed.wait()
    async with consumer(url, queue):
        assert await waiting == ["first of letters", "second, attempt 2", "third"]
