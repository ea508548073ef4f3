"""What a queue and a store can do decides who keeps the keys of tasks."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from tests.workers.tasks.task_queues import DUPLICATE, HOUR, QUEUED, ListQueue, WatchedKvStore, declared
from workers import DeduplicationMode, Queue, Tasks, Unsupported
from workers.kv import Key, KvStore, MemoryKvStore
from workers.storage.memory import MemoryStorage


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
    """`TypeError` comes from the call itself, before the data is looked at; tasks without a key are enqueued."""
    queue = ListQueue()
    tasks = Tasks(queue, kv, deduplication_fallback="closed")
    seen: list[object] = []
    digest = declared(tasks, validate=seen.append)
    items = iter([1, object()])
    with pytest.raises(TypeError, match="set_if_absent"):
        tasks.enqueue_task_many(digest, items, deduplication_key="bob")  # not awaited
    with pytest.raises(TypeError, match="set_if_absent"):
        tasks.enqueue_task(digest, 1, deduplication_key="bob")
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
