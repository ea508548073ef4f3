"""Limits that tasks and queues declare."""

from __future__ import annotations

import pytest

from workers import Job, Limit, Queue, QueueOptions, Tasks, Unsupported
from workers.limits import HeldBack
from workers.storage.memory import MemoryStorage
from workers.storage.urls import open_storage


async def test_a_task_declares_its_limit() -> None:
    """Its jobs wait for it, those of each key for their own; it is stored with the queue."""
    queue = Queue(MemoryStorage(), options=QueueOptions(limits={"*": Limit(concurrency=9)}))
    tasks = Tasks(queue)

    @tasks.task(rate="1/d", concurrency_per_key=2, key="user")
    async def digest(user: int) -> None: ...

    @tasks.task("ping", rate="1/h")
    async def ping(job: Job) -> None: ...

    first, second, other = [await digest.enqueue(user) for user in (1, 1, 2)]
    pings = [await tasks.enqueue_task(ping, None) for _ in range(2)]
    assert await queue.manage.limits() == {
        "*": Limit(concurrency=9),
        "digest": Limit("1/d", concurrency=2),
        "ping": Limit("1/h"),
    }
    storage = queue.storage
    claims = await storage.claim("worker", leases={"*": queue.lease}, limit=10)
    assert [claim.job_id for claim in claims] == [first.id, other.id, pings[0].id]
    held = [await queue.held_back(one.id) for one in (second, pings[1])]
    assert [one and (one.limit, one.key) for one in held] == [("digest", "1"), ("ping", "")]
    assert await queue.manage.remove_limit("digest")
    assert await queue.held_back(second.id) is None
    await queue.stop()


async def test_a_queue_declares_limits_by_name() -> None:
    """Jobs of a limited name wait for it without a key; with any other key they are refused, and nothing is stored."""
    queue = Queue(MemoryStorage(), options=QueueOptions(limits={"send": Limit(concurrency=1)}))
    await queue.enqueue(1, name="send", id="a")
    await queue.enqueue(1, name="send", id="b")
    assert len(await queue.storage.claim("worker", leases={"*": queue.lease}, limit=10)) == 1
    assert await queue.held_back("b") == HeldBack("send", "", None)
    assert str(await queue.held_back("b")) == "for limit 'send', until another one ends"
    with pytest.raises(ValueError, match="have a limit, and so no ordering key"):
        await queue.enqueue(1, name="send", id="c", fair_key="x")
    assert await queue.get_status("c") is None
    await queue.stop()


def test_bad_limits_of_tasks_are_refused() -> None:
    """A rate of 0, a key without a limit, a queue that keeps none: at the declaration, in one line."""
    tasks = Tasks(Queue(MemoryStorage()))
    for bad in ({"rate": "0/s"}, {"concurrency_per_key": 0}, {"key": "user"}):
        with pytest.raises(ValueError, match=r"^task 'digest': [^\n]+$"):
            tasks.task("digest", **bad)(_handle)
    with pytest.raises(Unsupported, match="keeps no limits"):
        Queue(open_storage("bull+redis://127.0.0.1:1"), options=QueueOptions(limits={"*": Limit("1/s")}))
    with pytest.raises(Unsupported, match="keeps no limits"):
        Tasks(Queue(open_storage("bull+redis://127.0.0.1:1"))).task("digest", rate="1/s")(_handle)


async def _handle(job: Job) -> None: ...


async def test_data_without_the_key_are_refused() -> None:
    """Before anything is stored."""
    queue = Queue(MemoryStorage())
    tasks = Tasks(queue)
    task = tasks.task("digest", rate="1/s", key="user")(_handle)
    with pytest.raises(ValueError, match="per 'user', which these data lack"):
        await tasks.enqueue_task(task, {"other": 1})
    assert sum((await queue.counts()).values()) == 0
    await queue.stop()
