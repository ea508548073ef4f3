"""Tasks are declared by name and run by our workers."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.workers.running import outcome
from tests.workers.tasks.task_queues import DUPLICATE, HOUR, QUEUED, ListQueue, WatchedKvStore, declared
from workers import DeduplicationMode, Job, JobState, Queue, QueueOptions, Tasks, Unsupported
from workers.clock import ManualClock
from workers.errors import CorruptPayloadError
from workers.jobs import OutcomeKind
from workers.kv import MemoryKvStore
from workers.serde import Encoded, JsonSerde
from workers.storage.memory import MemorySpace, MemoryStorage


class Upper:
    """A serde unlike JSON, to see whose is used."""

    def dumps(self, value: object) -> bytes:
        return repr(value).upper().encode()

    def loads(self, data: bytes) -> object:
        return data.decode()


async def test_our_worker_runs_tasks_and_other_handlers() -> None:
    """Tasks are jobs: by name, in the queue's own encoding, with the attempts they declare."""
    storage = MemoryStorage(MemorySpace())
    queue = Queue(storage, options=QueueOptions(payload_serde=Upper()))
    tasks = Tasks(queue, MemoryKvStore())

    @tasks.task("digest", max_attempts=7)
    async def digest(job: Job) -> object:
        return [job.name, job.payload, job.max_attempts]

    @tasks.task("plain")
    def plain(job: Job) -> object:
        return job.max_attempts

    async def other(job: Job) -> str:
        return "other"

    queue.execute({**tasks.handlers(), "other": other})
    async with queue:
        enqueued = await tasks.enqueue_task(digest, "bob", deduplication_key="bob")
        again = await tasks.enqueue_task(digest, "eve", deduplication_key="bob")
        batch = await tasks.enqueue_task_many(plain, [1, 2])
        beside = await queue.enqueue(None, name="other")
        assert (again.status, again.id) == (DUPLICATE, enqueued.id)
        assert (await outcome(storage, enqueued.id)).result == JsonSerde().dumps(["digest", "'BOB'", 7])
        assert [(await outcome(storage, job_id)).result for job_id in batch.ids] == [b"3", b"3"]
        assert (await outcome(storage, beside.id)).result == b'"other"'


async def test_a_delay_and_an_ordering_key_reach_the_job() -> None:
    """A delayed task waits in the queue's own schedule; of one ordering key never two are claimed."""
    storage = MemoryStorage(MemorySpace())
    queue = Queue(storage)
    tasks = Tasks(queue)
    digest = declared(tasks)
    async with queue:
        delayed = await tasks.enqueue_task(digest, None, delay=HOUR)
        first, _ = (await tasks.enqueue_task_many(digest, [1, 2], ordering_key="o")).ids
        status = await queue.get_status(delayed.id)
        claims = await storage.claim("w", leases={"*": HOUR}, limit=3)
    assert status is not None
    assert (status.state, status.name) == (JobState.SCHEDULED, "digest")
    assert [claim.job_id for claim in claims] == [first]


async def test_the_function_gets_what_validation_made() -> None:
    """`validate` turns the decoded payload into what the function works on; the caller's form is what is stored."""
    storage = MemoryStorage(MemorySpace())
    queue = Queue(storage)
    tasks = Tasks(queue)

    @tasks.task("double", validate=lambda data: int(str(data)))
    async def double(job: Job) -> object:
        assert isinstance(job.payload, int)
        return job.payload * 2

    queue.execute(tasks.handlers())
    async with queue:
        with pytest.raises(ValueError, match="invalid literal"):
            await tasks.enqueue_task(double, "two")
        enqueued = await tasks.enqueue_task(double, "21")
        assert (await outcome(storage, enqueued.id)).result == b"42"
        stale = await queue.enqueue("secret", name="double")  # as one from before `validate` would be
        failed = await outcome(storage, stale.id)
    assert failed.kind is OutcomeKind.FAILED
    assert failed.error is not None
    assert failed.error.type == CorruptPayloadError.__name__
    assert "secret" not in failed.error.message + failed.error.stack


async def test_encoded_bytes_are_stored_as_they_are() -> None:
    """A payload that is encoded already is not encoded again."""
    storage = MemoryStorage(MemorySpace())
    async with Queue(storage) as queue:
        await queue.enqueue(Encoded(b"\x00not json"))
        [claim] = await storage.claim("w", leases={"*": HOUR}, limit=1)
    assert claim.payload == b"\x00not json"
    assert "not json" not in repr(Encoded(b"not json"))


async def test_a_run_can_be_enqueued_as_a_job_among_others() -> None:
    """As for a transaction of the caller's: checked like any run, and run by the task with the attempts it is given."""

    def number(data: object) -> object:
        if not isinstance(data, int):
            raise TypeError("no number")
        return data * 2

    queue = Queue(MemoryStorage())
    tasks = Tasks(queue)

    @tasks.task("double", validate=number, max_attempts=7)
    async def double(job: Job) -> object:
        return [job.payload, job.max_attempts]

    [enqueued] = await queue.enqueue_many([tasks.spec(double, 21, ordering_key="numbers")])
    queue.execute(tasks.handlers())
    async with queue:
        assert (await outcome(queue.storage, enqueued.id)).result == b"[42,7]"
    with pytest.raises(TypeError, match="no number"):
        tasks.spec(double, "21")
    with pytest.raises(ValueError, match="declared elsewhere"):
        Tasks(queue).spec(double, 21)
    later = await queue.enqueue_many([tasks.spec(double, 1, delay=HOUR)])
    status = await queue.get_status(later[0].id)
    assert status is not None
    assert status.state is JobState.SCHEDULED


async def test_a_run_as_a_job_has_its_tasks_key() -> None:
    """By each mode the key of a `spec` is the one that `enqueue_task` takes: either is told the job of the other."""
    queue = Queue(MemoryStorage())
    tasks = Tasks(queue)
    digest, other = declared(tasks), declared(tasks, "other")
    async with queue:
        for mode in DeduplicationMode:
            key = f"{mode}/1"
            specs = [
                tasks.spec(digest, at, deduplication_key=key, deduplication_mode=mode, delay=HOUR) for at in (1, 2)
            ]
            first, second = await queue.enqueue_many(specs)
            again = await tasks.enqueue_task(digest, 3, deduplication_key=key, deduplication_mode=mode)
            [late] = await queue.enqueue_many([tasks.spec(digest, 4, deduplication_key=key, deduplication_mode=mode)])
            assert [one.status for one in (first, second, again, late)] == [QUEUED, QUEUED, DUPLICATE, DUPLICATE]
            assert (again.id, late.id) == (first.id, first.id)
            [free] = await queue.enqueue_many([tasks.spec(other, 1, deduplication_key=key, deduplication_mode=mode)])
            assert free.status is QUEUED
        assert sum((await queue.counts()).values()) == 9


async def test_the_time_of_a_runs_key_begins_when_it_is_due() -> None:
    """A `spec` with a delay has its key for the delay and the TTL, as an enqueued task has."""
    clock = ManualClock()
    queue = Queue(MemoryStorage(MemorySpace(clock)))
    tasks = Tasks(queue, deduplication_ttl=timedelta(minutes=10))
    digest = declared(tasks)
    async with queue:
        await queue.enqueue_many([tasks.spec(digest, 1, deduplication_key="bob", delay=HOUR)])
        clock.advance(timedelta(minutes=69))
        assert (await tasks.enqueue_task(digest, 2, deduplication_key="bob")).status is DUPLICATE
        clock.advance(timedelta(minutes=1))
        assert (await tasks.enqueue_task(digest, 3, deduplication_key="bob")).status is QUEUED


async def test_a_mark_is_no_part_of_a_job() -> None:
    """Where the queue keeps no keys a `spec` takes none, before the data is looked at, whatever store there is."""
    kv, seen = WatchedKvStore(), list[object]()
    tasks = Tasks(ListQueue(), kv)
    digest = declared(tasks, validate=seen.append)
    with pytest.raises(Unsupported, match="natively"):
        tasks.spec(digest, 1, deduplication_key="bob")
    assert (kv.asked, seen) == ([], [])
    assert tasks.spec(digest, 1).deduplication is None
