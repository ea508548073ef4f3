"""Handlers that read what the jobs gave that theirs came after."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from workers import (
    Job,
    JobCancelledError,
    JobFailedError,
    JobGoneError,
    JobSpec,
    MaxRetriesError,
    Queue,
    UnrecoverableError,
    Unsupported,
)
from workers.jobs import JobRef
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing.steps import claim_one, enqueue
from workers.testing.steps import job as new_job
from workers.worker.attempt import Attempt


async def _work(job: Job) -> object:
    """Do as the payload says, or add up what those before it gave."""
    match job.payload:
        case "join":
            return {str(one): ended.result for one, ended in (await job.results()).items()}
        case "fail":
            raise UnrecoverableError("no")
        case "retry":
            raise ValueError("not yet")
    return job.payload


async def test_a_job_joins_what_those_before_it_gave() -> None:
    """It has their results by id, though nothing is kept of them; one that comes after nobody has none."""
    queue = Queue(MemoryStorage(), concurrency=5)
    queue.execute(_work)
    async with queue:
        parts = [
            JobSpec(payload=number, id=f"part-{number}", result_ttl=timedelta(milliseconds=1)) for number in (1, 2)
        ]
        await queue.manage.pause()
        await queue.enqueue_many([*parts, JobSpec(payload="join", id="join", after=["part-1", "part-2"])])
        await queue.manage.resume()
        assert await queue.wait_for_job_chain_completion("join", timeout=30) == {"part-1": 1, "part-2": 2}
        assert await queue.enqueue_and_wait("join") == {}


async def test_a_job_that_runs_in_any_case_reads_why_others_did_not_complete() -> None:
    """A result that there is none of raises what waiting for it would; the ends can be asked for first."""
    seen: dict[str, object] = {}

    async def work(job: Job) -> object:
        if job.payload != "look":
            return await _work(job)
        for job_id, ended in (await job.results()).items():
            assert ended.job == JobRef(queue.storage.queue, str(job_id))
            try:
                seen[ended.job.id] = ended.completed, ended.result
            except (JobFailedError, JobCancelledError, JobGoneError) as error:
                seen[ended.job.id] = type(error), ended.completed, ended.error and ended.error.message
        return None

    queue = Queue(MemoryStorage(), concurrency=5)
    queue.execute(work)
    async with queue:
        await queue.manage.pause()
        for job_id, payload in (("good", 1), ("bad", "fail"), ("worse", "retry"), ("off", 1), ("gone", 1)):
            await queue.enqueue(payload, id=job_id, max_attempts=1)
        after = ["good", "bad", "worse", "off", "gone", "unknown"]
        await queue.enqueue("look", id="look", after=after, after_failure="run")
        await queue.cancel("off")
        await queue.manage.remove(["gone"])
        await queue.manage.resume()
        await queue.wait_for_job_chain_completion("look", timeout=30)
    assert seen == {
        "good": (True, 1),
        "bad": (JobFailedError, False, "no"),
        "worse": (MaxRetriesError, False, "not yet"),
        "off": (JobCancelledError, False, None),
        "gone": (JobGoneError, False, None),
        "unknown": (JobGoneError, False, None),
    }


async def test_results_of_other_queues_come_by_queue_and_id(tmp_path: Path) -> None:
    """Of two jobs of one id, that of another queue is under its `JobRef`."""
    url = f"sqlite+aiosqlite:///{tmp_path}/q.db"
    storages = [SqlStorage(url, name) for name in ("here", "parts")]
    await storages[0].migrate()
    here, parts = (Queue(storage) for storage in storages)
    for queue in (here, parts):
        queue.execute(_work)
    async with here, parts:
        await here.manage.pause()
        await here.enqueue(1, id="part")
        await here.enqueue(None, id="held", name="nobody's")
        await parts.enqueue_and_wait(2, id="part", timeout=30)
        await here.enqueue("join", id="join", after=["part", JobRef("parts", "part")])
        await here.manage.resume()
        told = await here.wait_for_job_chain_completion("join", timeout=30)
    assert told == {"part": 1, str(JobRef("parts", "part")): 2}


async def test_a_large_result_is_there_as_long_as_its_record() -> None:
    """It is too large for a copy, so it is read where it is kept; then the handler learns what became of it."""
    large = "x" * 70_000
    queue = Queue(MemoryStorage(), concurrency=5)
    queue.execute(_work)
    async with queue:
        await queue.enqueue_and_wait(large, id="large")
        assert await queue.enqueue_and_wait("join", after=["large"]) == {"large": large}
        await queue.manage.pause()
        await queue.enqueue("join", id="late", after=["large"], max_attempts=1)
        await queue.manage.remove(["large"])
        await queue.manage.resume()
        with pytest.raises(JobFailedError, match=r"JobGoneError: job 'large' of queue .* too large to be copied"):
            await queue.wait_for_job_chain_completion("late", timeout=30)


async def test_where_no_job_follows_others_there_are_no_results() -> None:
    """A job that no worker of ours runs refuses to say; one of a storage without dependencies came after nobody."""
    job = Job(id="a", name="work", payload=1, attempt=1, max_attempts=1, created_at=datetime.now(UTC))
    with pytest.raises(Unsupported, match="no worker"):
        await job.results()
    storage = MemoryStorage()
    await enqueue(storage, new_job("a"))
    attempt = Attempt(await claim_one(storage), "q", lambda claim, progress: None)
    assert await attempt.results() == {}
