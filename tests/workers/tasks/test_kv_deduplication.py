"""Marks in a store keep a key for one task, also when the enqueue, the store or the caller fails in the middle."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta

import pytest

from tests.workers.tasks.task_queues import (
    DUPLICATE,
    HOUR,
    PREFIX,
    QUEUED,
    ListQueue,
    Refused,
    WatchedKvStore,
    declared,
    refuse,
)
from workers import StorageUnavailable, Tasks
from workers.clock import ManualClock
from workers.kv import Key, MemoryKvStore
from workers.kv.redis import RedisKvStore
from workers.tasks import kv_deduplication as deduplication
from workers.testing.steps import PATIENCE

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
