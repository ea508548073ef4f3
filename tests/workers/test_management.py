"""What an operator does to a queue, through `Queue.manage`."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import pytest

import workers.management
from tests.workers.running import Recorder
from workers import QueueOptions
from workers.errors import Unsupported
from workers.jobs import JobState, JobStatus
from workers.queue import Queue
from workers.specs import JobSpec
from workers.storage.memory import MemoryStorage
from workers.testing import Harness, steps
from workers.testing.faults import counting
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job

HOUR: Final = timedelta(hours=1)
NAMES: Final = ("a1", "b1", "a2")


async def run_all(queue: Queue, count: int) -> None:
    """So many jobs were claimed; those with the payload `bad` failed for good, the others completed."""
    for claim in await steps.claim(queue.storage, count):
        bad = claim.payload == b'"bad"'
        await steps.apply(queue.storage, steps.failed(claim) if bad else steps.completed(claim))


async def test_a_paused_queue_runs_nothing() -> None:
    """Jobs are taken but not run, until the queue is resumed, which wakes its worker."""
    recorder = Recorder()
    queue = Queue(MemoryStorage(), options=QueueOptions(observers=[recorder]))
    queue.execute(lambda job: None)
    await queue.manage.pause()
    async with queue:
        await recorder.seen(Kind.READY)
        await queue.enqueue(1, id="job")
        assert await steps.claim(queue.storage) == []
        await queue.manage.resume()
        await recorder.seen(Kind.COMPLETED)


async def test_failed_jobs_are_retried_by_id(harness: Harness) -> None:
    """Only the failed ones, with fresh attempts where the storage gives them; the answer says how many."""
    async with Queue(await harness.open()) as queue:
        await queue.enqueue_many([JobSpec(payload=word, id=word) for word in ("bad", "good")])
        await run_all(queue, 2)
        assert (await queue.manage.retry(["bad", "good", "unknown"])).ids == ("bad",)
        used = 0 if queue.storage.capabilities.fresh_retries else 1
        assert (await steps.claim_one(queue.storage)).attempt == used + 1


async def test_failed_jobs_are_retried_by_what_they_are(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that match, on however many pages, and no other."""
    monkeypatch.setattr(workers.management, "BATCH", 3)
    async with Queue(await harness.open()) as queue:
        await queue.enqueue_many([JobSpec(payload="bad", name=f"of-{number % 2}") for number in range(20)])
        await run_all(queue, 20)

        def even(status: JobStatus) -> bool:
            assert status.state is JobState.FAILED
            return status.name == "of-0"

        retried = await queue.manage.retry_where(even)
        assert retried == len(set(retried.ids)) == 10
        assert {claim.name for claim in await steps.claim(queue.storage, 10)} == {"of-0"}
        assert (await queue.counts())[JobState.FAILED] == 10
        assert await queue.manage.retry_where(lambda status: False) == 0


async def test_jobs_are_listed_promoted_and_removed(harness: Harness) -> None:
    """What waits for its time is shown page by page, made due, or taken out."""
    async with Queue(await harness.open()) as queue:
        await queue.enqueue_many([JobSpec(payload=1, id=name, delay=HOUR) for name in ("a", "b", "c")])
        first = await queue.manage.list(JobState.SCHEDULED, limit=2)
        assert len(first.jobs) == 2
        rest = await queue.manage.list(JobState.SCHEDULED, cursor=first.cursor)
        assert {status.id for status in (*first.jobs, *rest.jobs)} == {"a", "b", "c"}
        assert rest.cursor is None
        assert await queue.manage.promote(["a", "unknown"]) == 1
        assert (await steps.claim_one(queue.storage)).job_id == "a"
        assert await queue.manage.remove(iter(["a", "b"])) == 1, "a running job stays"
        assert await queue.get_status("b") is None


async def test_what_waits_can_be_drained_and_what_ended_cleaned(harness: Harness) -> None:
    """Each touches its own: the one no finished job, the other only those of the state it is given."""
    async with Queue(await harness.open()) as queue:
        await queue.enqueue_many([JobSpec(payload=word, id=word) for word in ("good", "bad")])
        await run_all(queue, 2)
        await queue.enqueue_many([JobSpec(payload=1), JobSpec(payload=1, delay=HOUR)])
        assert await queue.manage.drain() == 2
        assert await queue.manage.clean(JobState.COMPLETED, older_than=HOUR) == 0
        assert await queue.manage.clean(JobState.COMPLETED, older_than=timedelta(0)) == 1
        left = {state: number for state, number in (await queue.counts()).items() if number}
        assert left == {JobState.FAILED: 1}
        with pytest.raises(ValueError, match="queued"):
            await queue.manage.clean(JobState.QUEUED, older_than=HOUR)


async def test_workers_are_told() -> None:
    """The workers of the queue, with how many jobs they hold."""

    async def ask(job: Job) -> list[tuple[str, int]]:
        return [(worker.id, worker.claims) for worker in await queue.manage.workers()]

    queue = Queue(MemoryStorage(), options=QueueOptions(worker_id="mine"))
    queue.execute(ask)
    async with queue:
        assert await queue.enqueue_and_wait(1) == [["mine", 1]]


async def test_one_id_is_not_taken_for_several() -> None:
    """A text alone would be its letters, none of which is an id: an error, and the storage is not asked."""
    storage, calls = counting(MemoryStorage())
    manage = Queue(storage).manage
    for verb in (manage.retry, manage.remove, manage.promote):
        with pytest.raises(TypeError, match=r"as \['job'\]"):
            await verb("job")
    assert not calls


async def test_each_verb_connects_on_its_own() -> None:
    """An operator's queue need not be started; it is connected once, and let go."""
    storage, calls = counting(MemoryStorage())
    queue = Queue(storage)
    await queue.manage.pause()
    await queue.manage.list(JobState.QUEUED)
    assert calls["connect"] == 1
    await queue.stop()
    assert calls["disconnect"] == 1


async def test_jobs_are_listed_by_name() -> None:
    """Oldest first; a storage that cannot says so, and is not asked."""
    queue = Queue(MemoryStorage())
    async with queue:
        await queue.enqueue_many([JobSpec(payload=1, id=name, name=name[0], priority=-ord(name[1])) for name in NAMES])
        page = await queue.manage.list(JobState.QUEUED, name="a")
        assert [found.id for found in page.jobs] == ["a1", "a2"]
    with pytest.raises(Unsupported, match="by name"):
        await Queue("bull+redis://127.0.0.1:1/0").manage.list(JobState.QUEUED, name="a")
