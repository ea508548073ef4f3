"""Tasks are run by the consumer of a foreign queue."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.workers.tasks.task_queues import HOUR, ListQueue, Refused, WatchedKvStore, declared
from workers import Job, Retry, RetryPolicy, Snooze, StorageUnavailable, Task, Tasks, UnrecoverableError
from workers.errors import UnknownJobError
from workers.jobs import UNCOUNTED_RETRIES


def failing(tasks: Tasks, error: BaseException, **settings: Any) -> Task:  # each test passes what the decorator takes
    """A task that raises this."""

    @tasks.task("failing", **settings)
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
    """Retry sets the delay, uncounted and snoozed runs give the attempt back, Unrecoverable ends it."""
    for error, attempt, uncounted in (
        (Retry(delay=HOUR), 2, 0),
        (Retry(delay=HOUR, counted=False), 1, 1),
        (Snooze(HOUR), 1, 0),
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
