"""A wrong setting is told where it is written, by its name, and numbers of seconds are durations."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.workers.running import outcome
from workers import Handler, JobSpec, Queue, QueueOptions, Retry, RetryPolicy, Snooze, Tasks, Worker, WorkerOptions
from workers.crons import Cron
from workers.jobs import OutcomeKind
from workers.storage.memory import MemoryStorage


def _queue(**settings: Any) -> Queue:  # Any: wrong ones
    rare = {name: settings.pop(name) for name in set(settings) - {"concurrency", "max_attempts", "result_ttl"}}
    return Queue(MemoryStorage(), **settings, options=QueueOptions(**rare))


def _worker(**settings: Any) -> Worker:  # Any: likewise
    rare = {name: settings.pop(name) for name in set(settings) - {"concurrency", "lease", "observers"}}
    return Worker(MemoryStorage(), {"*": print}, **settings, options=WorkerOptions(**rare))


@pytest.mark.parametrize("make", [_queue, _worker])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("retry", 5),
        ("concurrency", 0),
        ("concurrency", "4"),
        ("concurrency", True),
        ("overtime", -1),
        ("overtime", 1.5),
        ("lease", "30"),
        ("lease", 0),
        ("lease", timedelta(0)),
        ("lease", float("nan")),
        ("grace", "20"),
        ("grace", -1),
        ("worker_id", ""),
        ("on_failed", 5),
        ("not_ready", True),
        ("middlewares", [5]),
        ("backoffs", {"custom": 5}),
        ("payload_serde", "json"),
        ("result_serde", object()),
        ("crons", ["* * * * *"]),
    ],
)
def test_a_wrong_setting_of_queues_and_workers_is_told_by_name(
    make: Callable[..., object], setting: str, value: object
) -> None:
    """Where it is made, not with the first job that fails, and not in a task that nobody looks at."""
    with pytest.raises((TypeError, ValueError), match=setting.replace("_", ".")):
        make(**{setting: value})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: _queue(max_attempts=0), "max_attempts"),
        (lambda: _queue(keep_failed=5), "retention"),
        (lambda: _queue(observers=[5]), "observers"),
        (lambda: _queue(limits=5), "limits are by name"),
        (lambda: _queue(limits={"send": "10/s"}), "limits are by name"),
        (lambda: Queue("memory://", options=WorkerOptions()), "QueueOptions"),  # type: ignore[arg-type]  # refused
        (lambda: _worker(poll_interval=0), "poll_interval"),
        (lambda: _worker(max_stalls="3"), "max_stalls"),
        (lambda: _worker(crons=[Cron(name="c", job="j", pattern="3 * * *")]), "4 fields, not five or six"),
        (lambda: _queue().crons.add(Cron(name="c", job="j", pattern="3 * * *")), "4 fields, not five or six"),
        (lambda: Cron(name="c", job="j", pattern=3), "a pattern is a text"),  # type: ignore[arg-type]  # what is refused
        (lambda: Handler(print, retry=5), "retry is a RetryPolicy"),  # type: ignore[arg-type]  # likewise
        (lambda: Handler(print, lease="5"), "lease is a timedelta"),  # type: ignore[arg-type]  # likewise
        (lambda: Handler("print"), "a handler is something to call"),  # type: ignore[arg-type]  # likewise
        (lambda: RetryPolicy(initial="5"), "initial is a timedelta"),  # type: ignore[arg-type]  # likewise
        (lambda: Tasks(_queue(), retry=5), "retry is a RetryPolicy"),  # type: ignore[arg-type]  # likewise
        (lambda: Tasks(_queue(), retry=RetryPolicy()), "a Queue has its own retry"),
        (lambda: Tasks(_queue()).task(max_attempts="3")(print), "max_attempts"),  # type: ignore[call-overload]  # likewise
        (lambda: Retry(delay="5"), "delay is a timedelta"),  # type: ignore[arg-type]  # likewise
        (lambda: Tasks(_queue()).cron(print), r"@tasks\.cron\('0 3 \* \* \*'\) above print"),  # type: ignore[arg-type]  # likewise
    ],
)
def test_other_wrong_settings_are_told(call: Callable[[], object], told: str) -> None:
    """Each where it is written."""
    with pytest.raises((TypeError, ValueError), match=told):
        call()


async def test_payloads_are_no_jobs() -> None:
    """`enqueue_many([1, 2])` says what it takes."""
    with pytest.raises(TypeError, match=r"a JobSpec, as JobSpec\(payload=\.\.\.\), not int"):
        await _queue().enqueue_many([1, 2])  # type: ignore[list-item]  # what is refused


async def test_a_key_is_one_of_the_arguments() -> None:
    """The key of a task's limit, which would else be missed at each enqueue; of a handler's data nobody knows."""
    tasks = Tasks(_queue())

    async def mail(user_id: int) -> None:
        pass

    with pytest.raises(ValueError, match="its key 'user' is none of its arguments, which are: user_id"):
        tasks.task("mail", rate="1/s", key="user")(mail)
    tasks.task("mail", rate="1/s", key="user_id")(mail)


async def test_numbers_are_seconds_and_a_url_is_a_storage() -> None:
    """Wherever a duration is taken; a `result_ttl` alone is in milliseconds."""
    half: Any = 0.5  # Any: the fields of these values are annotated as what they become
    policy, handler = RetryPolicy(initial=half, maximum=half), Handler(print, lease=half, timeout=half)
    seconds = timedelta(seconds=half)
    assert (policy.initial, policy.maximum, handler.lease, handler.timeout) == (seconds,) * 4
    assert (Retry(delay=half).delay, Retry(at_least=half).at_least, Snooze(half).delay) == (seconds,) * 3
    assert Cron(name="c", job="j", every=2 * half).every == 2 * seconds
    queue = Queue("memory://?queue=mail", options=QueueOptions(lease=5, grace=0.5))
    assert (queue.storage.queue, queue.lease, queue.grace) == ("mail", timedelta(seconds=5), seconds)
    queue.execute(lambda job: job.payload)
    async with queue:
        assert await queue.enqueue_and_wait(1, delay=0.01, timeout=60) == 1
        later = await queue.enqueue_many([JobSpec(payload=None, delay=3_600)])
        status = await queue.get_status(later[0].id)
    assert status is not None
    assert status.next_run_at is not None
    assert timedelta(minutes=59) < status.next_run_at - status.created_at < timedelta(minutes=61)


async def test_a_refused_payload_says_which_argument_and_why() -> None:
    """In the dead letter, too; it is not quoted."""
    queue = Queue(storage := MemoryStorage(), max_attempts=1)
    tasks = Tasks(queue)

    @tasks.task
    async def mail(user_id: int) -> None:
        pass

    queue.execute(tasks.handlers())
    async with queue:
        enqueued = await queue.enqueue({"user_id": "secret"}, name="mail")
        ended = await outcome(storage, enqueued.id)
    assert (ended.kind, ended.error is not None) == (OutcomeKind.FAILED, True)
    assert ended.error is not None
    assert "task 'mail' refuses its payload: user_id: " in ended.error.message
    assert "secret" not in ended.error.message
