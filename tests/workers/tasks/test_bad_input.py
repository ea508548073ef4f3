"""What no task, key, time or payload can be is refused before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.workers.tasks.task_queues import DUPLICATE, QUEUED, ListQueue, WatchedKvStore, declared
from workers import DeduplicationMode, JobFailedError, JobState, Queue, Task, Tasks
from workers.checks import MAX_ATTEMPTS
from workers.kv import MemoryKvStore
from workers.storage.memory import MemoryStorage


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
        pytest.param(float("inf"), id="infinite"),
        pytest.param(True, id="truth"),
        pytest.param("3600", id="text"),
        pytest.param(None, id="none"),
    ],
)
def test_a_bad_ttl_is_refused_at_once(ttl: timedelta) -> None:
    """A TTL that is no positive, bounded timedelta is an error where it is written."""
    with pytest.raises((ValueError, TypeError), match="deduplication_ttl"):
        Tasks(ListQueue(), MemoryKvStore(), deduplication_ttl=ttl)


def test_a_bad_fallback_or_prefix_is_refused() -> None:
    """Anything but open and closed, and an empty prefix, are errors."""
    with pytest.raises(ValueError, match="deduplication_fallback"):
        Tasks(ListQueue(), deduplication_fallback="ajar")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match="key"):
        Tasks(ListQueue(), kv_prefix=())


@pytest.mark.parametrize("delay", [timedelta(seconds=-1), timedelta.max, -5, None, "5"])
async def test_a_bad_delay_or_ordering_key_leaves_no_mark(delay: timedelta) -> None:
    """What the enqueue cannot take is refused before the key is claimed."""
    kv, queue = WatchedKvStore(), ListQueue()
    tasks = Tasks(queue, kv)
    digest = declared(tasks)
    with pytest.raises((ValueError, TypeError), match="delay"):
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


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({}, "missing a required argument: 'user_id'"),
        ({"user_id": 1, "word": "a"}, "got an unexpected keyword argument 'word'"),
        ({"user_id": "secret"}, "user_id: "),
    ],
)
async def test_a_signature_that_changed_under_waiting_jobs_is_told(payload: object, told: str) -> None:
    """The job fails at once, and its error names the argument."""
    app = Tasks("memory://")

    @app.task
    async def mail(user_id: int) -> None: ...

    waiting = await app.queue.enqueue(payload, name="mail")
    async with app:
        with pytest.raises(JobFailedError) as failed:
            await app.queue.wait_for_job_chain_completion(waiting.id, PATIENCE_SECONDS)
    assert "task 'mail' refuses its payload: " in str(failed.value)
    assert told in str(failed.value)
    assert "secret" not in str(failed.value)
