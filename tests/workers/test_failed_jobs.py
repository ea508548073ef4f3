"""Dead letters: what is kept of failed jobs, who is told of them, and how they leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from tests.workers.running import AT_ONCE, Recorder
from workers import QueueOptions
from workers.clock import ManualClock
from workers.details import JobDetails
from workers.errors import JobFailedError, MaxRetriesError, UnrecoverableError
from workers.jobs import DROP, JobState
from workers.queue import Queue
from workers.specs import JobSpec
from workers.storage.base import Storage
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.testing import Harness, steps
from workers.testing.faults import faulty
from workers.testing.steps import PATIENCE
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.failures import OnFailed
from workers.worker.handlers import HandlerFunction, Job
from workers.worker.maintenance import Reaper

MINUTE = timedelta(minutes=1)
LETTER = {"to": "bob"}


async def refuse(job: Job) -> None:
    raise KeyError("bob")


@asynccontextmanager
async def at_work(
    handler: HandlerFunction,
    storage: Storage | None = None,
    *,
    max_attempts: int = 3,
    on_failed: OnFailed | None = None,
    worker_id: str | None = None,
) -> AsyncIterator[Queue]:
    """A queue whose worker runs the handler, and repeats what fails at once."""
    options = QueueOptions(retry=AT_ONCE, on_failed=on_failed, worker_id=worker_id)
    queue = Queue(storage or MemoryStorage(), max_attempts=max_attempts, options=options)
    queue.execute(handler)
    async with queue:
        yield queue


async def job_of(queue: Queue, job_id: str) -> JobDetails:
    found = await queue.get_job(job_id)
    assert found is not None
    return found


async def fail(queue: Queue, *specs: JobSpec) -> None:
    """Run the jobs, all of which fail at once."""
    await queue.enqueue_many(specs)
    for claim in await steps.claim(queue.storage, len(specs)):
        await steps.apply(queue.storage, steps.failed(claim))


async def test_a_failed_job_tells_all(harness: Harness) -> None:
    """Its payload, its last error with the traceback, and each attempt: who ran it, when, and why it failed."""
    storage = await harness.open()
    async with at_work(refuse, storage, worker_id="w1", max_attempts=2) as queue:
        with pytest.raises(MaxRetriesError):
            await queue.enqueue_and_wait(LETTER, id="letter", timeout=timedelta(seconds=PATIENCE))
        found = await job_of(queue, "letter")
        assert await queue.get_job("unknown") is None
    assert (found.payload, found.result, found.status.state) == (LETTER, None, JobState.FAILED)
    assert found.error is not None
    assert "raise KeyError" in found.error.stack
    assert [(one.attempt, one.worker_id, one.error_type) for one in found.failures] == [
        (1, "w1", "KeyError"),
        (2, "w1", "KeyError"),
    ]
    assert all(one.started_at is not None and one.started_at <= one.ended_at for one in found.failures)


async def test_the_error_of_a_waiter_has_the_payload() -> None:
    """Whether the waiter enqueued the job, asks for its result, or waits for a chain; also when nothing was kept."""
    async with at_work(refuse, max_attempts=1) as queue:
        with pytest.raises(JobFailedError) as dropped:
            await queue.enqueue_and_wait(LETTER, keep_failed=DROP)
        with pytest.raises(MaxRetriesError) as waited:
            await queue.enqueue_and_wait(LETTER, id="letter")
        with pytest.raises(MaxRetriesError) as asked:
            await queue.get_result("letter")
        with pytest.raises(MaxRetriesError) as chained:
            await queue.wait_for_job_chain_completion("letter")
    assert [dropped.value.payload, *(told.value.payload for told in (waited, asked, chained))] == [LETTER] * 4


async def test_a_waiter_of_an_undecodable_job_hears_why() -> None:
    """A payload that nobody can decode takes the place of no error."""
    async with at_work(refuse) as queue:
        await queue.storage.enqueue([steps.job("odd", payload=b"\xff")])
        with pytest.raises(JobFailedError, match="cannot be decoded") as failed:
            await queue.wait_for_job_chain_completion("odd")
        found = await job_of(queue, "odd")
    assert failed.value.payload is None
    assert found.encoded_payload == b"\xff"
    with pytest.raises(ValueError, match="utf-8"):
        _ = found.payload
    assert json.loads(found.as_json())["payload_base64"] == "/w=="


async def test_failed_jobs_are_kept_for_a_week() -> None:
    """However short a result is kept; a queue or a job may say otherwise."""
    clock = ManualClock()
    queue = Queue(MemoryStorage(clock=clock), result_ttl=MINUTE)
    shorter = Queue(MemoryStorage(clock=clock), options=QueueOptions(keep_failed=MINUTE))
    async with queue, shorter:
        await fail(queue, JobSpec(payload=1, id="a", result_ttl=MINUTE), JobSpec(payload=1, id="b", keep_failed=MINUTE))
        await fail(shorter, JobSpec(payload=1, id="c"))
        clock.advance(timedelta(days=7) - MINUTE)
        assert [await queue.get_job(one) is not None for one in ("a", "b")] == [True, False]
        assert await shorter.get_job("c") is None
        clock.advance(MINUTE)
        assert await queue.get_job("a") is None
    with pytest.raises(ValueError, match="retention"):
        Queue(MemoryStorage(), options=QueueOptions(keep_failed=timedelta(0)))


async def test_failed_jobs_are_found_by_their_error() -> None:
    """By its type, by the name of the job, and by when it failed; with their payloads, however many there are."""
    clock = ManualClock()
    queue = Queue(MemoryStorage(clock=clock))
    async with queue:
        await fail(queue, *(JobSpec(payload=number, name="mail", id=f"m{number}") for number in range(50)))
        clock.advance(MINUTE)
        later = clock.now() - timedelta(seconds=1)
        await fail(queue, JobSpec(payload="late", name="sms", id="late"))
        await queue.enqueue("other", id="lost", max_attempts=1)
        await steps.claim(queue.storage, lease=MINUTE)
        clock.advance(MINUTE)
        await queue.storage.recover(1)

        async def payloads(**which: object) -> list[object]:
            return [one.payload async for one in queue.manage.failed(**which)]  # type: ignore[arg-type]  # any of them

        assert sorted(map(str, await payloads(name="mail"))) == sorted(map(str, range(50)))
        assert await payloads(error="StalledError") == ["other"]
        assert await payloads(error="ValueError", since=later) == ["late"]
        assert len(await payloads()) == 52


async def test_a_failed_job_is_exported_as_a_line() -> None:
    """JSON without line breaks, with everything that is known of it."""
    async with at_work(refuse, max_attempts=1) as queue:
        with pytest.raises(MaxRetriesError):
            await queue.enqueue_and_wait(LETTER, id="letter", name="mail", meta={"of": "ann"})
        [line] = [one.as_json() async for one in queue.manage.failed()]
    told = json.loads(line)
    assert "\n" not in line
    assert (told["id"], told["name"], told["payload"], told["state"]) == ("letter", "mail", LETTER, "failed")
    assert told["meta"] == {"of": "ann"}
    assert (told["error"]["type"], told["failures"][0]["error_type"]) == ("KeyError", "KeyError")


async def test_failed_jobs_are_sent_to_another_queue() -> None:
    """They wait there with id, name, payload, attempts and priority, and are gone here; others stay."""
    space = MemorySpace()
    queue, dead = Queue(MemoryStorage(space, "mail")), Queue(MemoryStorage(space, "dead"))
    async with queue, dead:
        await fail(queue, JobSpec(payload=LETTER, id="a", name="send", max_attempts=7, priority=3, meta={"of": "ann"}))
        await queue.enqueue(1, id="waits")
        assert await queue.manage.send(["a", "waits", "unknown"], dead) == 1
        assert await queue.get_job("a") is None
        assert await queue.get_status("waits") is not None
        [claim] = await steps.claim(dead.storage, 5)
        assert (claim.job_id, claim.name, claim.payload) == ("a", "send", b'{"to":"bob"}')
        assert claim.meta == {"of": "ann"}
        assert (claim.max_attempts, claim.priority) == (7, 3)


async def test_sending_jobs_to_their_own_queue_loses_none() -> None:
    """They wait to run again, as by a retry."""
    queue = Queue(MemoryStorage())
    async with queue:
        await fail(queue, JobSpec(payload=1, id="a"))
        assert await queue.manage.send(["a"], queue) == 0
        assert (await job_of(queue, "a")).status.state is JobState.QUEUED


async def test_a_send_that_is_cut_off_is_repeated() -> None:
    """The job is in both queues until it is sent again, and never in none."""
    space = MemorySpace()
    storage, faults = faulty(MemoryStorage(space, "mail"))
    queue, dead = Queue(storage), Queue(MemoryStorage(space, "dead"))
    async with queue, dead:
        await fail(queue, JobSpec(payload=1, id="a"))
        faults.requests_lost["remove"] = 1
        with pytest.raises(Exception, match="lost"):
            await queue.manage.send(["a"], dead)
        assert await queue.get_job("a") is not None
        assert await queue.manage.send(["a"], dead) == 1
        assert len(await steps.claim(dead.storage, 5)) == 1


async def test_a_job_is_not_lost_to_another_of_its_id() -> None:
    """What the other queue has under the id is another job: this one stays, and is not counted."""
    space = MemorySpace()
    queue, dead = Queue(MemoryStorage(space, "mail")), Queue(MemoryStorage(space, "dead"))
    async with queue, dead:
        await dead.enqueue("older", id="a")
        await fail(queue, JobSpec(payload="newer", id="a"), JobSpec(payload=1, id="b"))
        assert (await queue.manage.send(["a", "b"], dead)).ids == ("b",)
        assert (await job_of(queue, "a")).payload == "newer"
        assert (await job_of(dead, "a")).payload == "older"


def gathering(told: list[JobDetails], reached: asyncio.Event) -> Callable[[JobDetails], Awaitable[None]]:
    async def gather(job: JobDetails) -> None:
        told.append(job)
        reached.set()

    return gather


async def test_whoever_wants_to_know_is_told_of_failures() -> None:
    """`on_failed` gets payload and error of what failed for good, once it is stored, and of nothing else."""
    told: list[JobDetails] = []
    reached = asyncio.Event()

    async def handler(job: Job) -> None:
        if job.payload == "good":
            return
        if job.payload == "hopeless":
            raise UnrecoverableError("no")
        raise KeyError("bob")

    async with at_work(handler, max_attempts=2, on_failed=gathering(told, reached)) as queue:
        await queue.enqueue_and_wait("good")
        for payload, keep in (("bad", None), ("hopeless", DROP)):
            reached.clear()
            with pytest.raises(JobFailedError):
                await queue.enqueue_and_wait(payload, id=payload, keep_failed=keep)
            await asyncio.wait_for(reached.wait(), PATIENCE)
    assert [(one.id, one.payload, one.error and one.error.type) for one in told] == [
        ("bad", "bad", "KeyError"),
        ("hopeless", "hopeless", "UnrecoverableError"),
    ]
    assert [one.attempt for one in told[0].failures] == [1, 2]


async def test_a_reapers_failures_are_told_as_well() -> None:
    """With payload and error, to `on_failed` and to observers, a few at a time."""
    clock, recorder = ManualClock(), Recorder()
    told: list[JobDetails] = []
    storage = MemoryStorage(clock=clock)
    ids = [f"{number:02}" for number in range(30)]
    await steps.enqueue(storage, *(steps.job(one, payload=f'"{one}"'.encode(), max_attempts=1) for one in ids))
    await steps.claim(storage, len(ids), lease=MINUTE)
    clock.advance(MINUTE)
    await Reaper(storage, observers=[recorder], on_failed=told.append).reap()
    assert [one.payload for one in told] == ids
    assert {one.error and one.error.type for one in told} == {"StalledError"}
    events = recorder.of(Kind.FAILED)
    assert [job_id for event in events for job_id in event.job_ids] == ids
    assert [one.payload for event in events for one in event.records] == [f'"{one}"'.encode() for one in ids]
    assert max(len(event.records) for event in events) < len(ids)


async def test_a_reaper_that_cannot_read_tells_the_ids() -> None:
    """An error is reported, and the failures are told without their payloads."""
    clock, recorder = ManualClock(), Recorder()
    storage, faults = faulty(MemoryStorage(clock=clock))
    await steps.enqueue(storage, steps.job("a", max_attempts=1))
    await steps.claim(storage, lease=MINUTE)
    clock.advance(MINUTE)
    faults.requests_lost["read"] = 1
    await Reaper(storage, observers=[recorder]).reap()
    [event] = recorder.of(Kind.FAILED)
    assert (event.job_ids, event.records) == (("a",), ())
    assert recorder.of(Kind.ERROR)


@pytest.mark.parametrize("slow", [False, True], ids=["raises", "hangs"])
async def test_who_is_told_cannot_hold_a_worker_up(
    slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An `on_failed` that raises or hangs is logged by the id of the job, and the next job runs."""
    monkeypatch.setattr("workers.worker.failures.PATIENCE", timedelta(milliseconds=20))

    async def bad(job: JobDetails) -> None:
        if slow:
            await asyncio.Event().wait()
        raise RuntimeError("a bug")

    async with at_work(refuse, max_attempts=1, on_failed=bad) as queue:
        for name in ("first", "second"):
            with pytest.raises(MaxRetriesError):
                await queue.enqueue_and_wait({"secret": "s3cret"}, id=name)
    assert [
        ("on_failed" in line, name in line) for line, name in zip(caplog.messages, ("first", "second"), strict=True)
    ]
    assert "s3cret" not in caplog.text


async def test_details_hide_what_they_hold() -> None:
    """Neither payload nor result is in the text of a job, which may end in a log."""
    queue = Queue(MemoryStorage())
    async with queue:
        await fail(queue, JobSpec(payload="s3cret", id="a"))
        assert "s3cret" not in repr(await queue.get_job("a"))
        assert "s3cret" not in repr(await queue.storage.read(["a"]))
