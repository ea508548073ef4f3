"""Tasks are declared by name, enqueued at most once per key and time, and run by our workers or a foreign consumer."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.workers.running import outcome
from tests.workers.tasks.task_queues import ListQueue, WatchedKvStore
from workers import (
    CorruptPayloadError,
    DeduplicationMode,
    Encoded,
    EnqueueStatus,
    Job,
    JobState,
    JsonSerde,
    ManualClock,
    MemoryKvStore,
    Queue,
    Retry,
    RetryPolicy,
    StorageUnavailable,
    Task,
    Tasks,
    UnknownJobError,
    UnrecoverableError,
    Unsupported,
)
from workers.checks import MAX_ATTEMPTS
from workers.jobs import UNCOUNTED_RETRIES, OutcomeKind
from workers.kv import Key, KvStore
from workers.kv.redis import RedisKvStore
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.tasks import marks as deduplication
from workers.testing.steps import PATIENCE

HOUR = timedelta(hours=1)
PREFIX = ("_federation", "task_deduplication")
QUEUED, DUPLICATE = EnqueueStatus.QUEUED, EnqueueStatus.DUPLICATE


class Refused(Exception):
    """What a test's queue or task raises."""


def declared(tasks: Tasks, name: str = "digest", **settings: object) -> Task:
    """A task that does nothing."""

    @tasks.task(name, **settings)  # type: ignore[arg-type]  # each test passes what the decorator takes
    async def nothing(job: Job) -> None: ...

    return nothing


async def refuse() -> None:
    raise Refused


# Deduplication by marks


async def test_a_second_enqueue_is_skipped_until_the_time_is_over() -> None:
    """The duplicate is told the id of the job that has the key; after the TTL the key is free again."""
    clock, queue = ManualClock(), ListQueue()
    tasks = Tasks(queue, MemoryKvStore(clock))
    digest = declared(tasks)
    first = await tasks.enqueue_task(digest, 1, deduplication_key="bob")
    second = await tasks.enqueue_task(digest, 2, deduplication_key="bob")
    assert (first.status, second.status) == (QUEUED, DUPLICATE)
    assert second.id == first.id
    assert queue.ids == [first.id]
    clock.advance(HOUR)
    third = await tasks.enqueue_task(digest, 3, deduplication_key="bob")
    assert third.status is QUEUED
    assert queue.ids == [first.id, third.id]


async def test_the_time_begins_when_the_job_is_due() -> None:
    """A delayed job has its key for the delay and the TTL."""
    clock = ManualClock()
    tasks = Tasks(ListQueue(), MemoryKvStore(clock), deduplication_ttl=timedelta(minutes=10))
    digest = declared(tasks)
    await tasks.enqueue_task(digest, None, deduplication_key="bob", delay=HOUR)
    clock.advance(timedelta(minutes=69))
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is DUPLICATE
    clock.advance(timedelta(minutes=1))
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is QUEUED


async def test_a_mark_lies_under_its_prefix_task_and_key() -> None:
    """The mark is where the manual says, apart from other uses of the store, and holds the job's id."""
    kv = MemoryKvStore()
    tasks = Tasks(ListQueue(), kv)
    enqueued = await tasks.enqueue_task(declared(tasks), None, deduplication_key="bob")
    assert await kv.get((*PREFIX, "digest", "bob")) == enqueued.id.encode()
    assert len(kv) == 1


async def test_a_key_is_its_tasks_own() -> None:
    """Two tasks have the same key without being in each other's way, however their names are spelled."""
    queue = ListQueue()
    tasks = Tasks(queue, MemoryKvStore())
    declarations = {name: declared(tasks, name) for name in ("a", "a/b", "a%2Fb")}
    for name, key in (("a", "b/c"), ("a/b", "c"), ("a%2Fb", "c"), ("a", "b")):
        assert (await tasks.enqueue_task(declarations[name], None, deduplication_key=key)).status is QUEUED
    assert len(queue.sent) == 4


@pytest.mark.parametrize("store", ["memory", "redis"])
async def test_a_hundred_enqueues_at_once_make_one_job(store: str, redis_url: str) -> None:
    """Of concurrent enqueues with one key, from two producers, one is queued and all others are told its id."""
    kv = MemoryKvStore() if store == "memory" else RedisKvStore(redis_url, prefix=f"kv-{uuid.uuid4().hex}")
    if isinstance(kv, RedisKvStore):
        await kv.connect()
    queue = ListQueue()
    producers = [Tasks(queue, kv) for _ in range(2)]
    declarations = [(tasks, declared(tasks)) for tasks in producers] * 50
    done = await asyncio.gather(
        *(tasks.enqueue_task(task, None, deduplication_key="bob") for tasks, task in declarations)
    )
    assert len(queue.sent) == 1
    assert [enqueued.status for enqueued in done].count(QUEUED) == 1
    assert {enqueued.id for enqueued in done} == set(queue.ids)
    if isinstance(kv, RedisKvStore):
        await kv.disconnect()


async def test_a_key_stands_for_the_whole_batch() -> None:
    """A batch is queued or skipped as one; a single task with its key is a duplicate of it too."""
    queue = ListQueue()
    tasks = Tasks(queue, MemoryKvStore())
    digest = declared(tasks)
    first = await tasks.enqueue_task_many(digest, (at for at in range(3)), deduplication_key="all", ordering_key="o")
    assert (first.status, list(first.ids)) == (QUEUED, queue.ids)
    assert [message.payload for message, _ in queue.sent] == [b"0", b"1", b"2"]
    assert {options.ordering_key for _, options in queue.sent} == {"o"}
    second = await tasks.enqueue_task_many(digest, [3, 4], deduplication_key="all")
    assert (second.status, second.ids) == (DUPLICATE, first.ids[:1])
    assert (await tasks.enqueue_task(digest, 5, deduplication_key="all")).id == first.ids[0]
    assert len(queue.sent) == 3


async def test_an_empty_batch_claims_nothing() -> None:
    """No items: nothing is enqueued, and the key is free for those who have some."""
    kv, queue = WatchedKvStore(), ListQueue()
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    assert (await tasks.enqueue_task_many(digest, [], deduplication_key="all")).ids == ()
    assert (kv.asked, queue.sent) == ([], [])


async def test_without_a_key_the_store_is_not_asked() -> None:
    """Tasks without a key are all enqueued."""
    kv, queue = WatchedKvStore(), ListQueue()
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    await tasks.enqueue_task(digest, 1)
    await tasks.enqueue_task(digest, 1)
    assert (kv.asked, len(queue.sent)) == ([], 2)


# Failures in the middle


async def test_a_failed_enqueue_leaves_no_mark() -> None:
    """The queue's error reaches the caller, and the next enqueue with the key is queued."""
    kv, queue = WatchedKvStore(), ListQueue()
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    queue.before = refuse
    with pytest.raises(Refused):
        await tasks.enqueue_task(digest, None, deduplication_key="bob")
    assert await kv.get((*PREFIX, "digest", "bob")) is None
    queue.before = None
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is QUEUED


async def test_a_cancelled_enqueue_leaves_no_mark() -> None:
    """Being cancelled while the queue takes its time counts as a failure."""
    kv, queue, entered = WatchedKvStore(), ListQueue(), asyncio.Event()

    async def hang() -> None:
        entered.set()
        await asyncio.Event().wait()

    queue.before = hang
    tasks = Tasks(queue, kv)
    enqueueing = asyncio.create_task(tasks.enqueue_task(declared(tasks), None, deduplication_key="bob"))
    async with asyncio.timeout(PATIENCE):
        await entered.wait()
        enqueueing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await enqueueing
    assert await kv.get((*PREFIX, "digest", "bob")) is None


async def test_a_claim_is_cancelled_only_with_its_mark_gone() -> None:
    """A mark that is set after its caller was cancelled would block the key: the cancellation waits for it."""
    kv, queue = WatchedKvStore(), ListQueue()
    kv.gate.clear()
    tasks = Tasks(queue, kv)
    enqueueing = asyncio.create_task(tasks.enqueue_task(declared(tasks), None, deduplication_key="bob"))
    async with asyncio.timeout(PATIENCE):
        await kv.entered.wait()
        enqueueing.cancel()
        await asyncio.sleep(0)
        enqueueing.cancel()
        kv.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await enqueueing
    assert kv.asked == ["set_if_absent", "compare_and_delete"]
    assert await kv.get((*PREFIX, "digest", "bob")) is None
    assert queue.sent == []


async def test_taking_a_mark_back_never_clears_anothers() -> None:
    """A mark that ran out while the enqueue hung, and is somebody else's by now, stays when the enqueue fails."""
    clock, queue = ManualClock(), ListQueue()
    kv = MemoryKvStore(clock)
    tasks, others = Tasks(queue, kv), Tasks(ListQueue(), kv)
    other_digest = declared(others)

    async def overtake() -> None:
        clock.advance(HOUR)
        await others.enqueue_task(other_digest, None, deduplication_key="bob")
        raise Refused

    queue.before = overtake
    with pytest.raises(Refused):
        await tasks.enqueue_task(declared(tasks), None, deduplication_key="bob")
    assert (await others.enqueue_task(other_digest, None, deduplication_key="bob")).status is DUPLICATE


async def test_when_taking_back_fails_too_the_first_error_wins(caplog: pytest.LogCaptureFixture) -> None:
    """The caller sees why the enqueue failed, the log that the mark is left to its TTL."""
    kv, queue = WatchedKvStore(), ListQueue()
    kv.requests_lost.add("compare_and_delete")
    queue.before = refuse
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    with pytest.raises(Refused):
        await tasks.enqueue_task(digest, None, deduplication_key="bob")
    assert "could not be taken back (StorageUnavailable)" in caplog.text
    queue.before = None
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is DUPLICATE


@pytest.mark.parametrize("fault", ["requests_lost", "answers_lost", "hangs"])
async def test_no_mark_outlives_its_time(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of taking it back, the enqueue's error is told, and the key is free when its time is over."""
    monkeypatch.setattr(deduplication, "ANSWER_SECONDS", 0.05)
    clock = ManualClock()
    kv, queue = WatchedKvStore(clock), ListQueue()
    tasks = Tasks(queue, kv)
    digest = declared(tasks)

    async def fail() -> None:
        if fault == "hangs":
            kv.gate.clear()
        else:
            getattr(kv, fault).add("compare_and_delete")
        raise Refused

    queue.before = fail
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(Refused):
            await tasks.enqueue_task(digest, None, deduplication_key="bob", delay=HOUR)
    assert queue.sent == []
    queue.before = None
    kv.gate.set()
    clock.advance(2 * HOUR)
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is QUEUED


async def test_a_store_that_goes_away_at_the_claim_leaves_no_lasting_mark() -> None:
    """The answer to the claim and the way to take it back are lost: told, nothing enqueued, and free after its time."""
    clock = ManualClock()
    kv, queue = WatchedKvStore(clock), ListQueue()
    kv.answers_lost.add("set_if_absent")
    kv.requests_lost.add("compare_and_delete")
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    with pytest.raises(StorageUnavailable, match="set_if_absent"):
        await tasks.enqueue_task(digest, None, deduplication_key="bob")
    kv.answers_lost.clear()
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is DUPLICATE
    assert queue.sent == []
    clock.advance(HOUR)
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is QUEUED


@pytest.mark.parametrize("lost", ["requests_lost", "answers_lost"])
async def test_a_store_that_fails_at_the_claim_leaves_no_mark(lost: str) -> None:
    """Whether the mark was set before the store failed or not, the caller is told and nothing is left."""
    kv, queue = WatchedKvStore(), ListQueue()
    getattr(kv, lost).add("set_if_absent")
    tasks = Tasks(queue, kv)
    with pytest.raises(StorageUnavailable, match="set_if_absent"):
        await tasks.enqueue_task(declared(tasks), None, deduplication_key="bob")
    assert queue.sent == []
    assert await kv.get((*PREFIX, "digest", "bob")) is None


async def test_a_store_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An enqueue is not held up for ever by a store that hangs."""
    monkeypatch.setattr(deduplication, "ANSWER_SECONDS", 0.01)
    kv, queue = WatchedKvStore(), ListQueue()
    kv.gate.clear()
    tasks = Tasks(queue, kv)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StorageUnavailable, match="did not answer within"):
            await tasks.enqueue_task(declared(tasks), None, deduplication_key="bob")
    assert queue.sent == []


async def test_a_store_that_repeats_a_claim_by_itself_is_understood() -> None:
    """A client that lost the answer and asked again finds the caller's own mark: it is no duplicate."""

    class Repeating(MemoryKvStore):
        async def set_if_absent(self, key: Key, value: bytes, *, ttl: timedelta) -> bytes | None:
            await super().set_if_absent(key, value, ttl=ttl)
            return await super().set_if_absent(key, value, ttl=ttl)

    queue = ListQueue()
    tasks = Tasks(queue, Repeating())
    digest = declared(tasks)
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is QUEUED
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is DUPLICATE
    assert len(queue.sent) == 1


# What queues and stores can do


class Plain:
    """A foreign store without conditions."""

    async def get(self, key: Key) -> bytes | None:
        raise AssertionError("not asked for")

    async def set(self, key: Key, value: bytes, *, ttl: timedelta) -> None:
        raise AssertionError("not asked for")


@pytest.mark.parametrize("kv", [None, Plain()], ids=["none", "plain"])
async def test_open_enqueues_without_deduplication(kv: KvStore | None, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing can be marked every task is enqueued, and the debug log says so; not without a key."""
    caplog.set_level(logging.DEBUG, "workers")
    queue = ListQueue()
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    await tasks.enqueue_task(digest, None)
    assert caplog.records == []
    await tasks.enqueue_task(digest, None, deduplication_key="bob")
    assert (await tasks.enqueue_task(digest, None, deduplication_key="bob")).status is QUEUED
    assert len(queue.sent) == 3
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert "without deduplication" in caplog.text


@pytest.mark.parametrize("kv", [None, Plain()], ids=["none", "plain"])
async def test_closed_refuses_before_anything_else(kv: KvStore | None) -> None:
    """`TypeError` comes before the data is looked at; tasks without a key are enqueued as ever."""
    queue = ListQueue()
    tasks = Tasks(queue, kv, deduplication_fallback="closed")
    seen: list[object] = []
    digest = declared(tasks, validate=seen.append)
    items = iter([1, object()])
    with pytest.raises(TypeError, match="set_if_absent"):
        await tasks.enqueue_task_many(digest, items, deduplication_key="bob")
    assert (seen, queue.sent, next(items)) == ([], [], 1)
    assert (await tasks.enqueue_task(digest, None)).status is QUEUED


@pytest.mark.parametrize("mode", [DeduplicationMode.SIMPLE, DeduplicationMode.DEBOUNCE])
async def test_modes_that_marks_cannot_keep_are_refused_first(mode: DeduplicationMode) -> None:
    """`simple` and `debounce` need the queue's own deduplication, whatever the fallback."""
    kv, queue = WatchedKvStore(), ListQueue()
    tasks = Tasks(queue, kv)
    seen: list[object] = []
    digest = declared(tasks, validate=seen.append)
    with pytest.raises(Unsupported, match=mode.value):
        await tasks.enqueue_task(digest, None, deduplication_key="bob", deduplication_mode=mode)
    assert (kv.asked, seen, queue.sent) == ([], [], [])


@pytest.mark.parametrize(
    ("mode", "ttl"),
    [
        (DeduplicationMode.SIMPLE, None),
        (DeduplicationMode.THROTTLE, timedelta(hours=3)),
        (DeduplicationMode.DEBOUNCE, timedelta(hours=3)),
    ],
)
async def test_a_native_queue_is_left_to_it(mode: DeduplicationMode, ttl: timedelta | None) -> None:
    """The key, with its task's name, the mode and the whole time are forwarded; the store is not touched."""
    kv, queue = WatchedKvStore(), ListQueue(deduplication=True)
    tasks = Tasks(queue, kv, deduplication_ttl=2 * HOUR, deduplication_fallback="closed")
    digest = declared(tasks)
    first = await tasks.enqueue_task(digest, 1, deduplication_key="b/b", deduplication_mode=mode, delay=HOUR)
    second = await tasks.enqueue_task_many(digest, [1, 2], deduplication_key="b/b", deduplication_mode=mode)
    assert (first.status, second.status, second.ids) == (QUEUED, DUPLICATE, (first.id,))
    assert kv.asked == []
    [(_, options)] = queue.sent
    assert options.deduplication_key == "digest/b%2Fb"
    assert (options.deduplication_mode, options.deduplication_ttl, options.delay) == (mode, ttl, HOUR)


async def test_a_queue_without_keys_gets_none() -> None:
    """Where marks deduplicate, the queue is told nothing of it."""
    queue = ListQueue()
    tasks = Tasks(queue, MemoryKvStore())
    await tasks.enqueue_task(declared(tasks), None, deduplication_key="bob")
    assert queue.sent[0][1].deduplication_key is None


# Bad input


async def test_every_payload_is_checked_before_the_claim() -> None:
    """One item that cannot be encoded, or is refused, and no mark is set and nothing enqueued."""
    kv, queue = WatchedKvStore(), ListQueue()
    tasks = Tasks(queue, kv)

    def positive(data: object) -> object:
        if not isinstance(data, int) or data <= 0:
            raise ValueError("not positive")
        return data

    digest, picky = declared(tasks), declared(tasks, "picky", validate=positive)
    for bad, error in ((object(), TypeError), (float("nan"), ValueError), ("\ud800", ValueError)):
        with pytest.raises(error):
            await tasks.enqueue_task_many(digest, [1, bad], deduplication_key="bob")
    with pytest.raises(ValueError, match="not positive"):
        await tasks.enqueue_task_many(picky, [1, 2, -3], deduplication_key="bob")
    assert (kv.asked, queue.sent) == ([], [])


@pytest.mark.parametrize("deduplication_native", [False, True], ids=["marks", "native"])
@pytest.mark.parametrize(
    ("key", "error"),
    [
        pytest.param("", ValueError, id="empty"),
        pytest.param("x" * 513, ValueError, id="huge"),
        pytest.param("x" * 506, ValueError, id="huge-with-its-task"),
        pytest.param("\ud800", ValueError, id="surrogate"),
        pytest.param(b"bob", TypeError, id="bytes"),
        pytest.param(7, TypeError, id="number"),
    ],
)
async def test_a_bad_key_is_refused(deduplication_native: bool, key: str, error: type[Exception]) -> None:
    """An empty, huge or odd key is no key, and does not mean none."""
    kv, queue = WatchedKvStore(), ListQueue(deduplication=deduplication_native)
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    with pytest.raises(error, match="deduplication key"):
        await tasks.enqueue_task(digest, None, deduplication_key=key)
    assert (kv.asked, queue.sent) == ([], [])
    if deduplication_native:
        with pytest.raises(error, match="deduplication key"):
            tasks.spec(digest, None, deduplication_key=key)


async def test_the_longest_key_with_odd_characters_works() -> None:
    """Any text of 512 bytes, its task's name and escapes included, is a key."""
    tasks = Tasks(ListQueue(), MemoryKvStore())
    digest = declared(tasks)
    for key in ("x" * 505, "\x00", "a:b\n../🦊", " "):
        assert (await tasks.enqueue_task(digest, None, deduplication_key=key)).status is QUEUED
        assert (await tasks.enqueue_task(digest, None, deduplication_key=key)).status is DUPLICATE


@pytest.mark.parametrize(
    "ttl",
    [
        pytest.param(timedelta(0), id="zero"),
        pytest.param(timedelta(seconds=-1), id="negative"),
        pytest.param(timedelta.max, id="endless"),
        pytest.param(3600.0, id="float"),
        pytest.param(float("inf"), id="infinite"),
        pytest.param(3600, id="number"),
        pytest.param(None, id="none"),
    ],
)
def test_a_bad_ttl_is_refused_at_once(ttl: timedelta) -> None:
    """A TTL that is no positive, bounded timedelta is an error where it is written."""
    with pytest.raises(ValueError, match="deduplication_ttl"):
        Tasks(ListQueue(), MemoryKvStore(), deduplication_ttl=ttl)


def test_a_bad_fallback_or_prefix_is_refused() -> None:
    """Anything but open and closed, and an empty prefix, are errors."""
    with pytest.raises(ValueError, match="deduplication_fallback"):
        Tasks(ListQueue(), deduplication_fallback="ajar")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match="key"):
        Tasks(ListQueue(), kv_prefix=())


@pytest.mark.parametrize("delay", [timedelta(seconds=-1), timedelta.max, 5, None])
async def test_a_bad_delay_or_ordering_key_leaves_no_mark(delay: timedelta) -> None:
    """What the enqueue cannot take is refused before the key is claimed."""
    kv, queue = WatchedKvStore(), ListQueue()
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    with pytest.raises(ValueError, match="delay"):
        await tasks.enqueue_task(digest, None, deduplication_key="bob", delay=delay)
    with pytest.raises(ValueError, match="ordering key"):
        await tasks.enqueue_task(digest, None, deduplication_key="bob", ordering_key="")
    with pytest.raises(ValueError, match="sometimes"):
        await tasks.enqueue_task(
            digest,
            None,
            deduplication_key="bob",
            deduplication_mode="sometimes",  # type: ignore[arg-type]  # what is refused
        )
    assert (kv.asked, queue.sent) == ([], [])


@pytest.mark.parametrize("mode", [DeduplicationMode.THROTTLE, DeduplicationMode.DEBOUNCE])
async def test_the_longest_times_are_kept_natively(mode: DeduplicationMode) -> None:
    """A delay and a TTL of 100 years each are a time like any other."""
    years = timedelta(days=36_500)
    queue = Queue(MemoryStorage())
    tasks = Tasks(queue, deduplication_ttl=years)
    digest = declared(tasks)
    async with queue:
        for status in (QUEUED, DUPLICATE):
            told = await tasks.enqueue_task(digest, None, deduplication_key="bob", deduplication_mode=mode, delay=years)
            assert told.status is status
        assert (await queue.counts())[JobState.SCHEDULED] == 1


async def test_a_declaration_is_checked() -> None:
    """Names are unique and bounded, settings in range, and a task is enqueued where it was declared."""
    tasks, others = Tasks(ListQueue()), Tasks(ListQueue())
    declared(tasks)

    async def slow(data: object) -> object:
        return data

    wrong: list[tuple[type[Exception], str, Callable[[], Task]]] = [
        (ValueError, "declared already", lambda: declared(tasks)),
        (ValueError, "needs a name", lambda: declared(tasks, "*")),
        (ValueError, "task name", lambda: declared(tasks, "")),
        (ValueError, "task name", lambda: declared(tasks, "x" * 513)),
        (ValueError, "max_attempts", lambda: declared(tasks, "a", max_attempts=0)),
        (ValueError, "max_attempts", lambda: declared(tasks, "a", max_attempts=MAX_ATTEMPTS + 1)),
        (ValueError, "lease", lambda: declared(tasks, "a", lease=timedelta(0))),
        (TypeError, "validate", lambda: declared(tasks, "a", validate=slow)),
    ]
    for error, says, declare in wrong:
        with pytest.raises(error, match=says):
            declare()
    assert set(tasks.handlers()) == {"digest"}
    with pytest.raises(ValueError, match="declared elsewhere"):
        await tasks.enqueue_task(declared(others), None)


# Running them on our queue


class Upper:
    """A serde unlike JSON, to see whose is used."""

    def dumps(self, value: object) -> bytes:
        return repr(value).upper().encode()

    def loads(self, data: bytes) -> object:
        return data.decode()


async def test_our_worker_runs_tasks_and_other_handlers() -> None:
    """Tasks are jobs: by name, in the queue's own encoding, with the attempts they declare."""
    storage = MemoryStorage(MemorySpace())
    queue = Queue(storage, payload_serde=Upper())
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


# Running them on a foreign queue


def failing(tasks: Tasks, error: BaseException, **settings: object) -> Task:
    """A task that raises this."""

    @tasks.task("failing", **settings)  # type: ignore[arg-type]  # each test passes what the decorator takes
    async def fail(job: Job) -> None:
        raise error

    return fail


async def test_a_foreign_consumer_runs_tasks() -> None:
    """`process` calls the function with the job as it was enqueued, and a plain function too."""
    queue, seen = ListQueue(), []
    tasks = Tasks(queue)

    @tasks.task("digest", validate=lambda data: [data])
    def digest(job: Job) -> object:
        seen.append((job.id, job.payload, job.attempt, job.max_attempts))
        return object()  # goes nowhere, so it need not be encodable

    enqueued = await tasks.enqueue_task(digest, "bob")
    await tasks.process(queue.take())
    assert seen == [(enqueued.id, ["bob"], 1, 3)]
    assert queue.sent == []


async def test_a_queue_without_retrial_gets_failed_tasks_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is enqueued again under the same id after the back-off, then logged; the key is not asked again."""
    queue, kv = ListQueue(), WatchedKvStore()
    back_off = RetryPolicy(initial=timedelta(seconds=1), jitter=0)
    tasks = Tasks(queue, kv, retry=back_off)
    task = failing(tasks, Refused("why"))
    enqueued = await tasks.enqueue_task(task, None, deduplication_key="bob", ordering_key="o")
    for attempt, delay in ((1, 1), (2, 2)):
        await tasks.process(queue.take())
        [(message, options)] = queue.sent
        assert (message.id, message.attempt) == (enqueued.id, attempt + 1)
        assert (options.delay, options.ordering_key) == (timedelta(seconds=delay), "o")
        assert options.deduplication_key is None
    await tasks.process(queue.take())
    assert queue.sent == []
    assert "failed for good in attempt 3" in caplog.text
    assert kv.asked == ["set_if_absent"]


async def test_what_a_task_raises_decides_there_too() -> None:
    """Retry sets the delay, uncounted and postponed runs give the attempt back, Unrecoverable ends it."""
    for error, attempt, uncounted in (
        (Retry(delay=HOUR), 2, 0),
        (Retry(delay=HOUR, counted=False), 1, 1),
        (Retry(delay=HOUR, postponed=True), 1, 0),
    ):
        queue = ListQueue()
        tasks = Tasks(queue)
        await tasks.enqueue_task(failing(tasks, error), None)
        await tasks.process(queue.take())
        [(message, options)] = queue.sent
        assert (message.attempt, message.uncounted, options.delay) == (attempt, uncounted, HOUR)
    queue = ListQueue()
    tasks = Tasks(queue)
    await tasks.enqueue_task(failing(tasks, UnrecoverableError("no")), None)
    await tasks.process(queue.take())
    assert queue.sent == []


async def test_uncounted_runs_cannot_go_on_for_ever() -> None:
    """After a hundred uncounted runs in a row one is counted, and a last attempt ends there."""
    queue = ListQueue()
    tasks = Tasks(queue)
    await tasks.enqueue_task(failing(tasks, Retry(counted=False), max_attempts=2), None)
    for _ in range(UNCOUNTED_RETRIES):
        await tasks.process(queue.take())
    assert queue.sent[0][0].attempt == 1
    await tasks.process(queue.take())
    assert (queue.sent[0][0].attempt, queue.sent[0][0].uncounted) == (2, 0)
    for _ in range(UNCOUNTED_RETRIES + 1):
        await tasks.process(queue.take())
    assert queue.sent == []


async def test_a_queue_with_retrial_is_told_what_failed() -> None:
    """Where the queue repeats by itself, the task's error is raised and nothing is enqueued."""
    queue = ListQueue(retrial=True)
    tasks = Tasks(queue)
    await tasks.enqueue_task(failing(tasks, Refused("why")), None)
    message = queue.take()
    with pytest.raises(Refused, match="why"):
        await tasks.process(message)
    assert queue.sent == []
    others = Tasks(queue)
    declared(others)
    with pytest.raises(UnknownJobError):
        await others.process(message)


async def test_a_task_that_cannot_be_enqueued_again_is_no_secret() -> None:
    """The queue's error reaches its consumer, which alone can keep the message."""
    queue = ListQueue()
    tasks = Tasks(queue)
    await tasks.enqueue_task(failing(tasks, Refused("why")), None)
    message = queue.take()

    async def down() -> None:
        raise StorageUnavailable("the queue is away")

    queue.before = down
    with pytest.raises(StorageUnavailable):
        await tasks.process(message)


async def test_a_queue_of_ours_keeps_keys_by_itself() -> None:
    """On a storage that deduplicates, in every mode, the store is not asked; the duplicate learns the job's id."""
    kv, queue = WatchedKvStore(), Queue(MemoryStorage())
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    async with queue:
        for mode in DeduplicationMode:
            first = await tasks.enqueue_task(digest, 1, deduplication_key=mode, deduplication_mode=mode, delay=HOUR)
            again = await tasks.enqueue_task_many(digest, [2, 3], deduplication_key=mode, deduplication_mode=mode)
            assert (first.status, again.status, again.ids) == (QUEUED, DUPLICATE, (first.id,))
        assert sum((await queue.counts()).values()) == 3
    assert kv.asked == []
