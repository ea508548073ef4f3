"""What the client's side of a queue makes of a job, and when the storage has it."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from workers import QueueOptions
from workers.deduplication import Deduplication
from workers.errors import StorageUnavailable, TransactionError, Unsupported
from workers.jobs import DROP, CancelResult, EnqueueStatus, JobState
from workers.queue import JobSpec, Queue
from workers.retry import RetryPolicy
from workers.specs import JobOptions
from workers.storage.base import Storage
from workers.storage.bullmq import BullMQStorage
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker.handlers import Job

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)


async def test_enqueue_stores_what_was_said(storage: Storage) -> None:
    """Everything a caller may say about a job reaches the worker that claims it."""
    backoff = RetryPolicy(initial=MINUTE, jitter=0)
    async with Queue(storage) as queue:
        enqueued = await queue.enqueue(
            {"to": "é"},
            id="a/b:c",
            name="mail",
            max_attempts=7,
            result_ttl=1_500,
            priority=3,
            backoff=backoff,
        )
        assert (enqueued.id, enqueued.status) == ("a/b:c", EnqueueStatus.QUEUED)
        claim = await steps.claim_one(storage)
    assert (claim.job_id, claim.name, claim.payload) == ("a/b:c", "mail", '{"to":"é"}'.encode())
    assert (claim.max_attempts, claim.priority, claim.backoff) == (7, 3, backoff)
    assert (claim.keep_completed, claim.keep_failed) == (timedelta(seconds=1.5), 7 * DAY)


async def test_defaults_are_the_queues(storage: Storage) -> None:
    """What a job leaves open is the queue's: attempts, retention, name; and an id of its own."""
    async with Queue(storage, max_attempts=5, result_ttl=2 * MINUTE, options=QueueOptions(keep_failed=DAY)) as queue:
        first, second = await queue.enqueue(1), await queue.enqueue(1)
        assert first.id != second.id
        claims = await steps.claim(storage, 2)
    assert steps.ids(claims) == [first.id, second.id]
    assert {(claim.name, claim.max_attempts) for claim in claims} == {("default", 5)}
    assert {(claim.keep_completed, claim.keep_failed) for claim in claims} == {(2 * MINUTE, DAY)}


async def test_retentions_can_be_set_apart(storage: Storage) -> None:
    """`keep_completed` wins over `result_ttl`, which says nothing of failures."""
    async with Queue(storage) as queue:
        await queue.enqueue_many([JobSpec(payload=1, result_ttl=MINUTE, keep_completed=DROP)])
        claim = await steps.claim_one(storage)
    assert (claim.keep_completed, claim.keep_failed) == (DROP, 7 * DAY)


async def test_a_duplicate_is_told_with_its_state(storage: Storage) -> None:
    """The same id again inserts nothing, whatever the payload, and tells where the first stands."""
    async with Queue(storage) as queue:
        await queue.enqueue("first", id="job")
        again = await queue.enqueue("second", id="job")
        assert (again.status, again.existing_state, again.result) == (EnqueueStatus.DUPLICATE, JobState.QUEUED, None)
        claim = await steps.claim_one(storage)
        running = await queue.enqueue("third", id="job")
        assert running.existing_state is JobState.PROCESSING
    assert claim.payload == b'"first"'


async def test_a_completed_job_answers_with_its_result(storage: Storage) -> None:
    """The same id again gets the decoded result of the first; nothing runs."""
    async with Queue(storage) as queue:
        await queue.enqueue("question", id="job")
        await steps.apply(storage, steps.completed(await steps.claim_one(storage), b'{"answer":42}'))
        again = await queue.enqueue("question", id="job")
    assert again.status is EnqueueStatus.COMPLETED
    assert again.existing_state is JobState.COMPLETED
    assert again.result == {"answer": 42}


async def test_many_jobs_take_one_call() -> None:
    """`enqueue_many` is one round trip, its answers are in the order of the jobs; of equal ids the first wins."""
    storage, calls = counting(MemoryStorage())
    async with Queue(storage) as queue:
        specs = [JobSpec(payload=number, id=str(number % 3)) for number in range(4)]
        results = await queue.enqueue_many(iter(specs))
    assert calls["enqueue"] == 1
    assert [result.id for result in results] == ["0", "1", "2", "0"]
    assert [result.status.value for result in results] == ["queued", "queued", "queued", "duplicate"]


async def test_no_jobs_are_no_error(storage: Storage) -> None:
    """An empty batch answers with an empty list."""
    async with Queue(storage) as queue:
        assert await queue.enqueue_many([]) == []


BAD_SPECS: Mapping[str, Callable[[], JobSpec]] = {
    "payload": lambda: JobSpec(payload=object()),
    "nan": lambda: JobSpec(payload=float("nan")),
    "id": lambda: JobSpec(payload=1, id=""),
    "long id": lambda: JobSpec(payload=1, id="é" * 257),
    "name": lambda: JobSpec(payload=1, name=""),
    "negative delay": lambda: JobSpec(payload=1, delay=-MINUTE),
    "endless delay": lambda: JobSpec(payload=1, delay=timedelta(days=40_000)),
    "delay and at": lambda: JobSpec(payload=1, delay=MINUTE, at=datetime.now(UTC)),
    "naive at": lambda: JobSpec(payload=1, at=datetime(2030, 1, 1)),  # noqa: DTZ001 - the mistake under test
    "priority": lambda: JobSpec(payload=1, priority=-1_001),
    "big priority": lambda: JobSpec(payload=1, priority=2_097_152),
    "attempts": lambda: JobSpec(payload=1, max_attempts=0),
    "ttl": lambda: JobSpec(payload=1, result_ttl=0),
    "ordering key": lambda: JobSpec(payload=1, ordering_key=""),
}


@pytest.mark.parametrize("spec", BAD_SPECS.values(), ids=BAD_SPECS.keys())
async def test_a_batch_with_a_mistake_stores_nothing(spec: Callable[[], JobSpec]) -> None:
    """Every job is checked before the first is stored; the storage is not even asked."""
    storage, calls = counting(MemoryStorage())
    queue = Queue(storage)
    with pytest.raises((ValueError, TypeError)):
        await queue.enqueue_many([JobSpec(payload="good"), spec()])
    assert not calls


@pytest.mark.parametrize("ttl", [1, 1_500, timedelta(milliseconds=1), timedelta(days=400)], ids=str)
async def test_result_ttls_that_are_taken(ttl: timedelta | int) -> None:
    """Whole milliseconds and durations above zero, for the queue and for a job."""
    storage = MemoryStorage()
    expected = ttl if isinstance(ttl, timedelta) else timedelta(milliseconds=ttl)
    await Queue(storage, result_ttl=ttl).enqueue("queue's")
    await Queue(storage).enqueue("job's", result_ttl=ttl)
    claims = await steps.claim(storage, 2)
    assert [claim.keep_completed for claim in claims] == [expected, expected]


@pytest.mark.parametrize(
    "ttl",
    [0, -1, timedelta(0), timedelta(seconds=-1), True, 1.5, "1h", 10**40, 10**15],
    ids=["0", "-1", "nothing", "negative", "True", "1.5", "text", "beyond timedelta", "beyond 100 years"],
)
async def test_result_ttls_that_are_refused(ttl: object) -> None:
    """Everything else is a `ValueError` at enqueue, before anything is stored."""
    storage = MemoryStorage()
    enqueue: Callable[..., object] = Queue(storage).enqueue
    with pytest.raises(ValueError, match=r"result_ttl|retention"):
        await enqueue(1, result_ttl=ttl)  # type: ignore[misc]  # wrong types are the point
    assert (await storage.counts())[JobState.QUEUED] == 0


@pytest.mark.parametrize("ttl", [0, -1, timedelta(0)], ids=repr)
def test_a_queue_with_no_retention_is_refused(ttl: timedelta | int) -> None:
    """A queue's own `result_ttl` is checked when the queue is made."""
    with pytest.raises(ValueError, match="result_ttl must be above zero"):
        Queue(MemoryStorage(), result_ttl=ttl)


async def test_a_delay_is_kept(storage: Storage) -> None:
    """A job with a delay reads `scheduled`, with the time of its run."""
    async with Queue(storage) as queue:
        await queue.enqueue(1, id="later", delay=MINUTE)
        status = await queue.get_status("later")
    assert status is not None
    assert status.state is JobState.SCHEDULED
    assert status.next_run_at is not None
    assert abs(status.next_run_at - status.created_at - MINUTE) < timedelta(seconds=1)


@pytest.mark.parametrize(
    ("ahead", "state"), [(MINUTE, JobState.SCHEDULED), (-MINUTE, JobState.QUEUED)], ids=["ahead", "past"]
)
async def test_at_names_a_moment(storage: Storage, ahead: timedelta, state: JobState) -> None:
    """A job for a moment to come waits for it; one for a moment past is due."""
    moment = datetime.now(UTC) + ahead
    async with Queue(storage) as queue:
        await queue.enqueue(1, id="job", at=moment)
        status = await queue.get_status("job")
    assert status is not None
    assert status.state is state
    if status.next_run_at is not None:
        assert abs(status.next_run_at - moment) < timedelta(seconds=1)


async def test_cancel_and_status(storage: Storage) -> None:
    """A cancelled job is known as such and never runs; an unknown one was never there."""
    async with Queue(storage) as queue:
        await queue.enqueue(1, id="job")
        assert await queue.cancel("job") is CancelResult.CANCELLED
        status = await queue.get_status("job")
        assert status is not None
        assert status.state is JobState.CANCELLED
        assert await queue.cancel("unknown") is CancelResult.NOT_FOUND
        assert await steps.claim(storage) == []


async def test_enqueue_connects_on_its_own() -> None:
    """A queue that was not started connects at its first call, once, however many come at the same time."""

    class Slow(MemoryStorage):
        async def connect(self) -> None:
            await asyncio.sleep(0)

    storage, calls = counting(Slow())
    queue = Queue(storage)
    await asyncio.gather(*(queue.enqueue(number) for number in range(20)))
    assert calls["connect"] == 1
    await queue.stop()
    assert calls["disconnect"] == 1


async def test_a_lost_reply_can_be_asked_again() -> None:
    """An enqueue that raised may have worked: the same id again is told as a duplicate, and runs once."""
    storage, faults = faulty(MemoryStorage())
    faults.replies_lost["enqueue"] = 1
    queue = Queue(storage)
    with pytest.raises(StorageUnavailable):
        await queue.enqueue(1, id="job")
    assert (await queue.enqueue(1, id="job")).status is EnqueueStatus.DUPLICATE


async def test_a_connection_that_failed_is_tried_again() -> None:
    """A storage that could not be reached at first is connected by the next call."""
    storage, faults = faulty(MemoryStorage())
    faults.requests_lost["connect"] = 1
    queue = Queue(storage)
    with pytest.raises(StorageUnavailable):
        await queue.enqueue(1)
    assert (await queue.enqueue(1)).status is EnqueueStatus.QUEUED


async def test_a_job_can_be_part_of_the_callers_transaction(tmp_path: Path) -> None:
    """With `connection` the job is there when the transaction commits, and was never there when it does not."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    storage = SqlStorage(url)
    await storage.migrate()
    engine = create_engine(url)
    async with Queue(storage) as queue:
        with engine.begin() as connection:
            await queue.enqueue(1, id="kept", connection=connection)
        with engine.connect() as connection:
            await queue.enqueue(1, id="undone", connection=connection)
            connection.rollback()
        assert await queue.get_status("kept") is not None
        assert await queue.get_status("undone") is None
    engine.dispose()


async def test_concurrent_enqueues_share_round_trips() -> None:
    """Of a hundred enqueues at once the first goes alone, the rest in one call, a large payload in its own.

    Each has its own answer.
    """
    slow, faults = faulty(MemoryStorage())
    faults.delayed["enqueue"] = 1_000
    storage, calls = counting(slow)
    queue = Queue(storage)
    large = "x" * 20_000
    results = await asyncio.gather(*(queue.enqueue(1, id=f"job-{number % 50}") for number in range(100)))
    assert [result.id for result in results] == [f"job-{number % 50}" for number in range(100)]
    assert [result.status for result in results[50:]] == [EnqueueStatus.DUPLICATE] * 50
    assert calls["enqueue"] == 2
    await asyncio.gather(*(queue.enqueue(large) for _ in range(3)))
    assert calls["enqueue"] == 5


async def test_a_nested_enqueue_is_refused_beside_others(tmp_path: Path) -> None:
    """A task with its own transaction open is told so at once, also while another task's enqueue is under way."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    storage = SqlStorage(url)
    await storage.migrate()
    engine = create_engine(url)
    async with Queue(storage) as queue:
        with engine.begin() as connection:
            await queue.enqueue(1, connection=connection)
            other = asyncio.create_task(queue.enqueue(2))
            await asyncio.sleep(0)
            with pytest.raises(TransactionError):
                await queue.enqueue(3)
        await other
        assert (await queue.counts())[JobState.QUEUED] == 2
    engine.dispose()


async def test_a_waiter_with_a_taken_key_has_the_result_of_the_job_that_has_it() -> None:
    """Concurrent waiters with one deduplication key share one run, also where their enqueues meet."""
    queue = Queue(MemoryStorage())
    runs: list[object] = []

    async def answer(job: Job) -> object:
        runs.append(job.payload)
        return job.payload

    async with queue:
        key = Deduplication(key="bob")
        waiters = [asyncio.create_task(queue.enqueue_and_wait(at, deduplication=key)) for at in range(20)]

        async def is_queued() -> bool:
            return (await queue.counts())[JobState.QUEUED] > 0

        await until(is_queued)
        async with asyncio.timeout(PATIENCE), Queue(queue.storage) as worker:
            await asyncio.sleep(0)
            worker.execute(answer)
            await worker.start()
            assert len(set(await asyncio.gather(*waiters))) == len(runs) == 1


async def test_a_lost_answer_tells_the_id() -> None:
    """Also one that was made, so that enqueueing it again finds the job if it is there; each caller has its own."""
    storage, faults = faulty(MemoryStorage())
    async with Queue(storage) as queue:
        faults.replies_lost["enqueue"] = 2
        calls = (queue.enqueue(1), queue.enqueue(2, id="two"))
        lost = await asyncio.gather(*calls, return_exceptions=True)
        [one], two = (error.job_ids for error in lost if isinstance(error, StorageUnavailable))
        assert two == ("two",)
        for job_id in (one, "two"):
            assert (await queue.enqueue(0, id=job_id)).status is EnqueueStatus.DUPLICATE
        faults.requests_lost["enqueue"] = 2
        with pytest.raises(StorageUnavailable) as many:
            await queue.enqueue_many([JobSpec(payload=1, id="a"), JobSpec(payload=2)])
        assert many.value.job_ids[0] == "a"
        assert len(many.value.job_ids) == 2
        with pytest.raises(StorageUnavailable) as waited:
            await queue.enqueue_and_wait(1, id="b")
        assert waited.value.job_ids == ("b",)


async def test_many_jobs_leave_the_loop_to_others() -> None:
    """While they are enqueued 500 at a time, everybody else has a turn after each 500."""
    storage, calls = counting(MemoryStorage())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with Queue(storage) as queue, steps.background(asyncio.create_task(others())):
        specs = [JobSpec(payload=number, id=str(number)) for number in range(10_500)]
        answers = await queue.enqueue_many(specs)
    assert [answer.id for answer in answers] == [str(number) for number in range(10_500)]
    assert calls["enqueue"] == 21
    assert turns >= 21


async def test_jobs_that_belong_together_are_one_call() -> None:
    """Those that follow others, that share a key, or are in a database, which stores all or none."""
    storage, calls = counting(MemoryStorage())
    async with Queue(storage) as queue:
        plain = [JobSpec(payload=1, id=str(number)) for number in range(1_500)]
        await queue.enqueue_many([*plain, JobSpec(payload=1, after=["1"])])
        assert calls["enqueue"] == 1
        assert await queue.enqueue_many([]) == []


async def test_wake_ups_are_held_in_a_block() -> None:
    """Those of its own enqueues, which share no call with those of other tasks; these wake at once."""
    storage = MemoryStorage()
    queue = Queue(storage)
    begin = asyncio.Event()

    async def somebody_else() -> None:
        await begin.wait()
        await queue.enqueue(2)

    async def asleep() -> asyncio.Task[None]:
        waiting = asyncio.create_task(storage.wait(["default"], timeout=MINUTE))
        for _ in range(3):  # its own turn, and then one to look
            await asyncio.sleep(0)
        assert not waiting.done()
        return waiting

    async with queue:
        other = asyncio.create_task(somebody_else())
        woken = await asleep()
        async with queue.with_notify():
            await queue.enqueue_many([JobSpec(payload=1)])
            assert not woken.done()
            own = [asyncio.create_task(queue.enqueue(1)) for _ in range(3)]
            begin.set()
            await asyncio.gather(*own, other, asyncio.wait_for(woken, PATIENCE))
            await storage.claim("w", leases={"*": MINUTE}, limit=9)
            woken = await asleep()
            await queue.enqueue(3)
        await asyncio.wait_for(woken, PATIENCE)


async def test_a_wake_up_that_fails_is_told_unless_the_block_did() -> None:
    """The jobs are stored then; an error of the block's own is not hidden by it."""

    class Mute(MemoryStorage):
        async def _wake_for(self, _: Collection[str]) -> None:
            raise StorageUnavailable("away")

    async def enqueue_and_raise(queue: Queue) -> None:
        async with queue.with_notify():
            await queue.enqueue(2)
            raise ZeroDivisionError

    async with Queue(Mute()) as queue:
        with pytest.raises(StorageUnavailable):
            async with queue.with_notify():
                await queue.enqueue(1)
        with pytest.raises(ZeroDivisionError):
            await enqueue_and_raise(queue)
        assert (await queue.counts())[JobState.QUEUED] == 2


async def test_a_storage_that_wakes_for_each_job_says_so() -> None:
    """Before anything is connected; and one outside of a database knows no connection."""
    queue = Queue(BullMQStorage("redis://127.0.0.1:1"))
    with pytest.raises(Unsupported, match="held_wake_ups"):
        async with queue.with_notify():
            pass
    with pytest.raises(Unsupported, match="connection"):
        async with Queue(MemoryStorage()).with_notify(object()):
            pass


def test_the_help_names_every_option() -> None:
    """Of an enqueue, whose signature has them as one."""
    told = inspect.getdoc(Queue.enqueue) or ""
    assert JobOptions.__annotations__.keys() <= set(re.findall(r"`(\w+)`", told))
