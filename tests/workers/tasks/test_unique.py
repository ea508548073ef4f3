"""Enqueues of a task that count as one: for a time or until the job has ended, by all arguments or some."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.workers.tasks.task_queues import ListQueue
from workers import DeduplicationMode, EnqueueStatus, Job, Queue, Tasks, Unsupported
from workers.clock import ManualClock
from workers.kv import MemoryKvStore
from workers.storage.memory import MemoryStorage
from workers.tasks import Unique

PATIENCE = timedelta(seconds=PATIENCE_SECONDS)
HOUR = timedelta(hours=1)
QUEUED, DUPLICATE = EnqueueStatus.QUEUED, EnqueueStatus.DUPLICATE


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def app(clock: ManualClock) -> Tasks:
    return Tasks(MemoryStorage(clock=clock))


async def test_the_same_arguments_count_once_in_a_period(app: Tasks, clock: ManualClock) -> None:
    """Whatever becomes of the job; other arguments, and other tasks, are others. A call may say otherwise."""

    @app.task(unique=HOUR)
    async def digest(user_id: int, words: dict[str, int]) -> None: ...

    @app.task(unique=3600)
    async def other(user_id: int, words: dict[str, int]) -> None: ...

    async with app:
        first = await digest.enqueue(1, {"a": 1, "b": 2})
        await first.result(PATIENCE)
        again = await digest.enqueue(words={"b": 2, "a": 1}, user_id=1)
    assert (again.status, again.id) == (DUPLICATE, first.id)
    assert (await digest.enqueue(2, {})).status is QUEUED
    assert (await other.enqueue(1, {"a": 1, "b": 2})).status is QUEUED
    assert (await digest.options(unique=False).enqueue(2, {})).status is QUEUED
    clock.advance(HOUR)
    assert (await digest.enqueue(2, {})).status is QUEUED


async def test_a_default_is_an_argument_like_one_that_is_given(app: Tasks) -> None:
    """For what is compared, by all arguments or some, and for the key of a limit; one that does not fit is none."""

    @app.task(unique=True)
    async def digest(user_id: int, zone: str = "UTC", since: int = None) -> None: ...  # type: ignore[assignment] # noqa: RUF013 - programs have it

    @app.task(unique=Unique(keys=["zone"]), rate="9/s", key="zone")
    async def report(user_id: int, zone: str = "UTC") -> None: ...

    assert (await digest.enqueue(1)).status is QUEUED
    assert (await digest.enqueue(1, "UTC")).status is DUPLICATE
    assert (await digest.enqueue(1, "CET")).status is QUEUED
    assert (await report.enqueue(1)).status is QUEUED
    assert (await report.enqueue(2, "UTC")).status is DUPLICATE
    assert report.spec(1).limit_key == "UTC"


async def test_true_is_until_the_job_has_ended_and_keys_choose_arguments(app: Tasks) -> None:
    @app.task(unique=Unique(keys=["user_id"]))
    async def digest(user_id: int, word: str) -> None: ...

    @app.task
    async def free(user_id: int) -> None: ...

    assert (await digest.enqueue(1, "a")).status is QUEUED
    assert (await digest.enqueue(1, "b")).status is DUPLICATE
    assert (await free.options(unique=True).enqueue(1)).status is QUEUED
    assert (await free.options(unique=True).enqueue(1)).status is DUPLICATE
    async with app:
        last = await free.enqueue(2)
        await last.result(PATIENCE)
    assert (await digest.enqueue(1, "c")).status is QUEUED


async def test_a_key_of_ones_own_is_taken_as_the_call_or_the_task_says(app: Tasks, clock: ManualClock) -> None:
    """Its time and mode: of the call, else of the task, else of all tasks."""

    @app.task(unique=Unique(period=HOUR / 2, mode=DeduplicationMode.DEBOUNCE))
    async def draft(text: str) -> str:
        return text

    @app.task
    async def plain(number: int) -> None: ...

    spec = draft.options(deduplication_key="x").spec("a").deduplication
    assert spec is not None
    assert (spec.mode, spec.ttl) == (DeduplicationMode.DEBOUNCE, HOUR / 2)
    call = plain.options(deduplication_key="x", deduplication_ttl=60)
    assert (await call.enqueue(1)).status is QUEUED
    clock.advance(timedelta(seconds=59))
    assert (await call.enqueue(2)).status is DUPLICATE
    clock.advance(timedelta(seconds=1))
    assert (await call.enqueue(3)).status is QUEUED


async def test_a_batch_is_compared_as_a_whole_and_a_mark_keeps_a_period_too() -> None:
    """On a queue without keys of its own, beside a store; until the end of a job it cannot."""
    app = Tasks(ListQueue(), MemoryKvStore())

    @app.task("digest", unique=HOUR)
    async def digest(job: Job) -> None: ...

    assert (await app.enqueue_task_many(digest, [1, 2])).status is QUEUED
    assert (await app.enqueue_task_many(digest, [1, 2])).status is DUPLICATE
    assert (await app.enqueue_task_many(digest, [1, 3])).status is QUEUED
    with pytest.raises(Unsupported, match="simple needs a queue that does it natively"):
        await app.enqueue_task(digest, 1, unique=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"unique": 0}, "unique must be above zero"),
        ({"unique": "1h"}, "unique is a timedelta or a number of seconds"),
        ({"unique": timedelta(days=40_000)}, "unique is up to 100 years"),
        ({"deduplication_ttl": 5}, "deduplication_ttl is for a deduplication_key"),
        ({"deduplication_ttl": "5", "deduplication_key": "x"}, "deduplication_ttl is a timedelta"),
        ({"deduplication_mode": "often", "deduplication_key": "x"}, "'often' is not a valid DeduplicationMode"),
    ],
)
async def test_wrong_options_are_told(app: Tasks, options: Any, told: str) -> None:
    """By name, before anything is stored; so is what a task is declared with."""

    @app.task
    async def digest(user_id: int) -> None: ...

    with pytest.raises((TypeError, ValueError), match=told):
        await digest.options(**options).enqueue(1)
    assert not any((await app.queue.counts()).values())


def test_wrong_declarations_are_told() -> None:
    app = Tasks(Queue("memory://"))

    async def digest(user_id: int) -> None: ...

    with pytest.raises(ValueError, match="its key 'user' is none of its arguments, which are: user_id"):
        app.task(unique=Unique(keys=["user"]))(digest)
    with pytest.raises(TypeError, match="task 'digest': unique is a timedelta"):
        app.task(unique="1h")(digest)  # type: ignore[call-overload]  # what is refused
    with pytest.raises(ValueError, match="a period goes with the modes throttle and debounce"):
        Unique(period=5, mode=DeduplicationMode.SIMPLE)
    with pytest.raises(TypeError, match=r"keys are names of arguments, as \('user_id',\)"):
        Unique(keys="user_id")


async def test_metadata_go_with_a_run() -> None:
    """By either way to enqueue; a queue of somebody else's keeps none."""
    app, foreign = Tasks("memory://"), Tasks(ListQueue())

    @app.task
    async def seen(job: Job) -> str:
        return job.meta["tenant"]

    call = seen.options(meta={"tenant": "a"})
    async with app:
        assert await (await call.enqueue()).result(PATIENCE) == "a"
        [queued] = await app.queue.enqueue_many([call.spec()])
        assert await app.queue.wait_for_job_chain_completion(queued.id, PATIENCE) == "a"

    @foreign.task
    async def other() -> None: ...

    with pytest.raises(Unsupported, match="keeps metadata; leave `meta` out"):
        await other.options(meta={"tenant": "a"}).enqueue()
