"""Tasks that recur."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.patience import until
from workers import Job, Queue, Tasks, Unsupported
from workers.clock import ManualClock
from workers.crons import Missed
from workers.jobs import JobState
from workers.storage.memory import MemoryStorage
from workers.storage.urls import open_storage
from workers.worker.maintenance import Ticker

MORNING = datetime(2026, 1, 5, tzinfo=UTC)


async def test_a_task_recurs() -> None:
    """As its decorator says; its function runs as that of any task, and can be enqueued by hand."""
    clock = ManualClock(MORNING)
    tasks = Tasks(Queue(MemoryStorage(clock=clock)))
    ran: list[str] = []

    @tasks.cron("0 3 * * *", timezone="Europe/Berlin", max_attempts=5)
    async def cleanup(job: Job, older_than: int = 30) -> None:
        ran.append(f"{job.id} {older_than} {job.max_attempts}")

    @tasks.cron(every=timedelta(hours=12), name="mail.digest", missed=Missed.SKIP)
    def digest() -> None:
        ran.append("digest")

    queue = tasks.working_queue()
    assert queue is not None
    async with queue:
        await until(_listed(queue, 2))
        assert {one.cron.name: one.due for one in await queue.crons.list()} == {
            "cleanup": MORNING + timedelta(hours=2),
            "mail.digest": MORNING + timedelta(hours=12),
        }
        clock.advance(timedelta(hours=12))
        await Ticker(queue.storage, (), report=print).tick()
        await cleanup.enqueue(older_than=1)
        await until(lambda: len(ran) == 3)
    at = int((MORNING + timedelta(hours=2)).timestamp() * 1000)
    assert sorted(ran)[1:] == [f"cron:cleanup:{at} 30 5", "digest"]
    assert sorted(ran)[0].endswith(" 1 5")


def _listed(queue: Queue, count: int):  # type: ignore[no-untyped-def]  # a predicate that is awaited
    async def listed() -> bool:
        return len(await queue.crons.list()) == count

    return listed


def test_what_cannot_recur_is_refused_where_it_is_declared() -> None:
    """Arguments that nobody gives, no time or two, a queue that keeps none."""
    tasks = Tasks(Queue(MemoryStorage()))
    with pytest.raises(TypeError, match="task 'digest': missing a required argument: 'user_id'"):

        @tasks.cron(every=timedelta(hours=1))
        async def digest(user_id: int) -> None: ...

    with pytest.raises(ValueError, match="a pattern or a period"):

        @tasks.cron()
        async def never() -> None: ...

    with pytest.raises(ValueError, match="the cron pattern 'daily'"):

        @tasks.cron("daily")
        async def daily() -> None: ...

    with pytest.raises(ValueError, match="declared already"):

        @tasks.cron("@daily", name="never")
        async def another() -> None: ...

    elsewhere = Tasks(Queue(open_storage("bull+redis://127.0.0.1:1")))
    with pytest.raises(Unsupported, match="BullStorage keeps nothing that recurs"):

        @elsewhere.cron("@daily")
        async def nightly() -> None: ...


async def test_nothing_recurs_in_a_unit_test() -> None:
    """What is enqueued in memory is what the test enqueues."""
    tasks = Tasks(Queue(MemoryStorage()))
    ran: list[int] = []

    @tasks.cron(every=timedelta(seconds=1))
    async def tick() -> None:
        ran.append(1)

    with tasks.in_memory() as memory:
        await tick.enqueue()
        await memory.drain()
    assert ran == [1]
    assert (await tasks.queue.counts())[JobState.COMPLETED] == 0  # type: ignore[union-attr]  # it is ours
