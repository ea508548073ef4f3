"""Tasks in tests of an application: kept in memory, run when the test says so, or at once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.tasks.task_queues import ListQueue
from workers import EnqueueStatus, JobState, Queue, Retry, Tasks, UnrecoverableError
from workers.pytest_plugin import TasksInMemory, tasks_in_memory
from workers.storage import open_storage

__all__ = ["tasks_in_memory"]  # a fixture, as the plugin gives it


class Shop:
    """An application with tasks on a queue in a file, and what they did."""

    def __init__(self, folder: Path) -> None:
        self.queue = Queue(open_storage(f"file://{folder}/jobs"))
        self.tasks = tasks = Tasks(self.queue)
        self.did: list[str] = []

        @tasks.task
        async def mail(to: str) -> str:
            self.did.append(f"mail {to}")
            return to

        @tasks.task
        async def order(item: str) -> None:
            self.did.append(f"order {item}")
            await mail.enqueue(to=item)
            self.did.append("ordered")

        @tasks.task
        def fail(times: int) -> None:
            self.did.append("fail")
            if self.did.count("fail") <= times:
                raise Retry(delay=timedelta(hours=1))

        @tasks.task
        def refuse() -> None:
            raise UnrecoverableError("never")

        self.mail, self.order, self.fail, self.refuse = mail, order, fail, refuse


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


async def test_a_drain_runs_what_was_enqueued_and_what_that_enqueues(
    shop: Shop, tasks_in_memory: TasksInMemory
) -> None:
    """Nothing of it reaches the queue itself."""
    memory = tasks_in_memory(shop.tasks)
    assert (await memory.drain()).completed == 0
    enqueued = await shop.order.enqueue("tea")
    assert [job.name for job in await memory.jobs()] == ["order"]
    assert shop.did == []
    assert (await memory.drain()).completed == 2
    assert shop.did == ["order tea", "ordered", "mail tea"]
    assert await memory.jobs() == []
    await enqueued.result()
    assert not any((await Queue(shop.queue.storage).counts()).values())


async def test_eager_tasks_have_run_when_the_enqueue_returns(shop: Shop, tasks_in_memory: TasksInMemory) -> None:
    """What a running task enqueues runs after it, as with any worker; a failure is raised at once."""
    tasks_in_memory(shop.tasks, eager=True)
    assert await (await shop.mail.enqueue("bob")).result() == "bob"
    await shop.order.enqueue("tea")
    assert shop.did == ["mail bob", "order tea", "ordered", "mail tea"]
    with pytest.raises(ExceptionGroup) as failed:
        await shop.refuse.enqueue()
    assert [str(error) for error in failed.value.exceptions] == ["never"]


async def test_retries_run_at_once_and_delayed_jobs_when_wanted(shop: Shop, tasks_in_memory: TasksInMemory) -> None:
    """No test waits for an hour."""
    memory = tasks_in_memory(shop.tasks)
    await shop.fail.enqueue(times=2)
    await shop.mail.options(delay=timedelta(hours=1)).enqueue("eve")
    assert (await memory.drain()).completed == 1
    assert shop.did == ["fail"] * 3
    (left,) = await memory.jobs()
    assert left.state is JobState.SCHEDULED
    assert (await memory.drain(delayed=True)).completed == 1
    assert shop.did[3:] == ["mail eve"]


async def test_failures_are_raised_or_returned(shop: Shop, tasks_in_memory: TasksInMemory) -> None:
    memory = tasks_in_memory(shop.tasks)
    await shop.refuse.enqueue()
    with pytest.raises(ExceptionGroup, match="tasks failed"):
        await memory.drain()
    await shop.refuse.enqueue()
    drained = await memory.drain(raises=False)
    assert (drained.completed, [type(error) for error in drained.errors]) == (0, [UnrecoverableError])


async def test_afterwards_everything_is_as_before(shop: Shop) -> None:
    """Also for tasks on another queue than ours."""
    foreign = ListQueue()
    tasks = Tasks(foreign)

    @tasks.task
    async def mail(to: str) -> None: ...

    with tasks.in_memory() as memory:
        await mail.enqueue("bob")
        once = mail.options(deduplication_key="one")
        assert (await once.enqueue("eve")).status is EnqueueStatus.QUEUED
        assert (await once.enqueue("eve")).status is EnqueueStatus.DUPLICATE
        assert len(await memory.jobs()) == 2
    assert foreign.ids == []
    await mail.enqueue("bob")
    assert len(foreign.ids) == 1
    with shop.tasks.in_memory():
        assert shop.tasks.queue is not shop.queue
    assert shop.tasks.queue is shop.queue
