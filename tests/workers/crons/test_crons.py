"""Definitions of what recurs, their ticks, and a queue's book of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from workers import Job, Queue
from workers.clock import ManualClock
from workers.crons import Cron, Missed
from workers.errors import StorageError, Unsupported
from workers.jobs import CronRow, JobState
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.storage.urls import open_storage
from workers.testing.harness import Harness
from workers.testing.steps import PATIENCE
from workers.worker.maintenance import LOOK_SECONDS, Ticker

MIDNIGHT = datetime(2026, 3, 28, tzinfo=UTC)
"""The day before the clocks of Berlin go from 2:00 to 3:00, at 1:00 UTC."""
HOUR = timedelta(hours=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(MIDNIGHT)


@pytest.fixture
async def queue(clock: ManualClock) -> AsyncIterator[Queue]:
    queue = Queue(MemoryStorage(clock=clock))
    yield queue
    await queue.stop()


def cron(name: str = "night", pattern: str | None = "0 3 * * *", **settings: object) -> Cron:
    return Cron(**{"name": name, "job": "work", "pattern": pattern, **settings})  # type: ignore[arg-type]  # as given


def every(period: timedelta, **settings: object) -> Cron:
    return cron(pattern=None, every=period, **settings)


async def declare(queue: Queue, *crons: Cron) -> None:
    for one in crons:
        queue.crons.add(one)
    await queue.crons.declare()


async def ticked(queue: Queue) -> list[datetime]:
    """Let a worker of another process tick, and return the times of the jobs that are there."""
    await Ticker(queue.storage, (), report=_raise).tick()
    page = await queue.storage.list(JobState.QUEUED, limit=500)
    stamps = [job.id.rsplit(":", 1)[1] for job in page.jobs if ":now:" not in job.id]
    return sorted(datetime.fromtimestamp(int(stamp) / 1000, UTC) for stamp in stamps)


def _raise(error: Exception) -> None:
    raise error


async def due_of(queue: Queue) -> datetime | None:
    [status] = await queue.crons.list()
    return status.due


async def test_a_job_comes_at_each_time(queue: Queue, clock: ManualClock) -> None:
    """Never early; its id is that of its time."""
    await declare(queue, cron())
    clock.advance(3 * HOUR - timedelta(milliseconds=1))
    assert await ticked(queue) == []
    clock.advance(timedelta(milliseconds=1))
    assert await ticked(queue) == [MIDNIGHT + 3 * HOUR]
    assert await ticked(queue) == [MIDNIGHT + 3 * HOUR]
    clock.advance(24 * HOUR)
    assert await ticked(queue) == [MIDNIGHT + 3 * HOUR, MIDNIGHT + 27 * HOUR]


async def test_an_hour_that_the_clocks_skip_is_made_up_for(queue: Queue, clock: ManualClock) -> None:
    """2:30 in Berlin does not exist that day: the job comes in the hour after; the days around it are as ever."""
    await declare(queue, cron(pattern="30 2 * * *", timezone="Europe/Berlin"))
    for _ in range(3):
        clock.advance(24 * HOUR)
        await ticked(queue)
    times = [one.strftime("%d %H:%M") for one in await ticked(queue)]
    assert times == ["28 01:30", "29 01:30", "30 00:30"]


async def test_an_hour_that_comes_twice_has_one_job(queue: Queue, clock: ManualClock) -> None:
    """The first time."""
    clock.advance(datetime(2026, 10, 24, tzinfo=UTC) - MIDNIGHT)
    await declare(queue, cron(pattern="30 2 * * *", timezone="Europe/Berlin"))
    for _ in range(72):
        clock.advance(HOUR)
        await ticked(queue)
    times = [one.strftime("%d %H:%M") for one in await ticked(queue)]
    assert times == ["24 00:30", "25 00:30", "26 01:30"]


async def test_a_clock_that_steps_back_over_a_time_enqueues_nothing_twice(queue: Queue, clock: ManualClock) -> None:
    """Not even when the job of that time is gone, or a newer definition is declared meanwhile."""
    await declare(queue, cron())
    clock.advance(3 * HOUR)
    [first] = await ticked(queue)
    await queue.manage.remove([f"cron:night:{int(first.timestamp() * 1000)}"])
    clock.advance(-HOUR)
    await declare(Queue(queue.storage), cron(version=2, pattern="0 3 * * 0-6"))
    for _ in range(4):
        clock.advance(HOUR / 2)
        assert await ticked(queue) == []
    assert await due_of(queue) == MIDNIGHT + 27 * HOUR


@pytest.mark.parametrize(("missed", "hours"), [(Missed.SKIP, []), (Missed.ONCE, [1]), (Missed.ALL, [1, 2, 3, 4, 5])])
async def test_missed_times(queue: Queue, clock: ManualClock, missed: Missed, hours: list[int]) -> None:
    """No worker was there for five and a half hours. Afterwards it goes on in the same rhythm."""
    await declare(queue, every(HOUR, missed=missed))
    clock.advance(5.5 * HOUR)
    assert await ticked(queue) == [MIDNIGHT + hour * HOUR for hour in hours]
    assert await due_of(queue) == MIDNIGHT + 6 * HOUR
    clock.advance(HOUR / 2)
    assert (await ticked(queue))[-1] == MIDNIGHT + 6 * HOUR


@pytest.mark.parametrize(("late", "hours"), [(timedelta(minutes=1), [3]), (timedelta(seconds=61), [])])
async def test_a_time_is_missed_after_a_minute(
    queue: Queue, clock: ManualClock, late: timedelta, hours: list[int]
) -> None:
    """One that is a minute over is kept, whether or not others before it were missed."""
    await declare(queue, every(HOUR, missed=Missed.SKIP))
    clock.advance(3 * HOUR + late)
    assert await ticked(queue) == [MIDNIGHT + hour * HOUR for hour in hours]


async def test_very_many_missed_times_are_bounded(
    queue: Queue, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A year of minutes is a hundred jobs, and a warning."""
    await declare(queue, every(timedelta(minutes=1), missed=Missed.ALL))
    clock.advance(timedelta(days=365))
    assert len(await ticked(queue)) == 100
    assert "missed more than 100 times" in caplog.text


async def test_of_many_workers_one_enqueues_each_time(queue: Queue, clock: ManualClock) -> None:
    """All of them look."""
    await declare(queue, every(HOUR))
    for hours in range(1, 4):
        clock.advance(HOUR)
        await asyncio.gather(*(Ticker(queue.storage, (), report=_raise).tick() for _ in range(8)))
        assert len(await ticked(queue)) == hours


async def test_the_highest_version_counts_in_whatever_order(queue: Queue) -> None:
    """A rolling deploy has both for a while, and an old process may start last."""
    await declare(queue, cron(version=2, pattern="0 4 * * *"))
    await declare(Queue(queue.storage), cron(version=1))
    assert await due_of(queue) == MIDNIGHT + 4 * HOUR
    await declare(Queue(queue.storage), cron(version=3, pattern="0 5 * * *"))
    assert await due_of(queue) == MIDNIGHT + 5 * HOUR


async def test_another_definition_of_one_version_changes_nothing(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """And is told."""
    await declare(queue, cron())
    await declare(Queue(queue.storage), cron(pattern="0 5 * * *"))
    assert await due_of(queue) == MIDNIGHT + 3 * HOUR
    assert "raise its version to replace it" in caplog.text


async def test_what_is_paused_comes_back_without_what_it_missed(queue: Queue, clock: ManualClock) -> None:
    """And is due when it would be anyway."""
    await declare(queue, every(HOUR))
    assert await queue.crons.pause("night")
    clock.advance(3.5 * HOUR)
    assert await ticked(queue) == []
    assert (await queue.crons.list())[0].paused
    assert await queue.crons.resume("night")
    assert await due_of(queue) == MIDNIGHT + 4.5 * HOUR
    clock.advance(HOUR)
    assert await ticked(queue) == [MIDNIGHT + 4.5 * HOUR]


async def test_what_is_removed_stays_so_until_a_higher_version(
    queue: Queue, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that still declares it does not bring it back."""
    await declare(queue, every(HOUR))
    assert await queue.crons.remove("night")
    await declare(Queue(queue.storage), every(HOUR))
    clock.advance(5 * HOUR)
    assert await ticked(queue) == []
    assert await queue.crons.list() == []
    assert "was removed and does not recur" in caplog.text
    await declare(Queue(queue.storage), every(HOUR, version=2))
    assert await due_of(queue) == MIDNIGHT + 6 * HOUR


async def test_one_can_be_run_now(queue: Queue) -> None:
    """As often as one likes; when it recurs stays as it was."""
    await declare(queue, cron(payload=b'{"n":1}'))
    first, second = await queue.crons.run_now("night"), await queue.crons.run_now("night")
    assert first is not None
    assert first != second
    assert (await queue.get_job(first)).payload == {"n": 1}  # type: ignore[union-attr]  # it is there
    assert await due_of(queue) == MIDNIGHT + 3 * HOUR


async def test_what_is_not_there_can_have_nothing_done(queue: Queue) -> None:
    """Each says so."""
    assert not await queue.crons.pause("none")
    assert not await queue.crons.resume("none")
    assert not await queue.crons.remove("none")
    assert await queue.crons.run_now("none") is None


async def test_a_row_of_a_newer_version_stops_no_other(queue: Queue, clock: ManualClock) -> None:
    """It is reported, and left to whoever can read it."""
    await declare(queue, every(HOUR))
    unread = CronRow(name="a", revision=1, due=MIDNIGHT, body='{"job":"work"}')
    assert isinstance(queue.storage, MemoryStorage)
    assert await queue.storage.replace_cron(unread)
    clock.advance(HOUR)
    told: list[Exception] = []
    assert await Ticker(queue.storage, [cron("a"), cron("b")], report=told.append).tick() == 0
    assert len((await queue.storage.list(JobState.QUEUED)).jobs) == 1
    assert [type(error) for error in told] == [StorageError]
    assert await Ticker(queue.storage, (), report=told.append).tick() == HOUR.total_seconds()
    await queue.crons.remove("night")
    assert await Ticker(queue.storage, (), report=told.append).tick() == LOOK_SECONDS


async def test_one_whose_job_is_refused_stops_no_other(tmp_path: Path, clock: ManualClock) -> None:
    """As by a trigger of somebody's in the database. It is reported, and tried again while the others go on."""
    storage = SqlStorage(f"sqlite:///{tmp_path}/jobs.db", clock=clock)
    await storage.migrate()
    queue, told, second = Queue(storage), list[Exception](), timedelta(seconds=1)
    await declare(queue, every(HOUR, name="a"), every(second, name="b"))
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as somebody:
        somebody.execute(
            "CREATE TRIGGER refusal BEFORE INSERT ON workers_jobs WHEN NEW.id LIKE '%cron:a:%'"
            " BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        )
    clock.advance(HOUR)
    ticker = Ticker(storage, (), report=told.append)
    assert await ticker.tick() == 0
    assert await ticker.tick() == second.total_seconds()
    clock.advance(second)
    assert await ticker.tick() == 0
    assert [type(error) for error in told] == [StorageError] * 3
    assert len((await storage.list(JobState.QUEUED)).jobs) == 2
    await queue.stop()
    await storage.disconnect()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "a pattern or a period"),
        ({"pattern": "0 3 * * *", "every": HOUR}, "a pattern or a period"),
        ({"pattern": "every day"}, "the cron pattern 'every day'"),
        ({"pattern": "0 0 31 2 *"}, "the month has no such day"),
        ({"pattern": "0 3 * * *", "timezone": "Mars/Base"}, "there is no time zone 'Mars/Base'"),
        ({"every": timedelta(milliseconds=1)}, "every is from 1 s"),
        ({"every": timedelta(0)}, "every is from 1 s"),
        ({"every": HOUR, "version": 0}, "version"),
        ({"every": HOUR, "name": ""}, "name of a cron"),
        ({"every": HOUR, "name": "n" * 401}, "at most 400 bytes"),
        ({"every": HOUR, "missed": "sometimes"}, "sometimes"),
    ],
)
def test_a_definition_that_cannot_be_is_refused(settings: dict[str, object], told: str) -> None:
    """Where it is written down."""
    with pytest.raises(ValueError, match=told):
        cron(**{"pattern": None, **settings})


async def test_two_definitions_of_one_name_in_a_process_are_refused(queue: Queue) -> None:
    """The same one twice is not."""
    queue.crons.add(cron())
    queue.crons.add(cron())
    with pytest.raises(ValueError, match="declared already"):
        queue.crons.add(cron(pattern="0 5 * * *"))


async def test_one_without_a_handler_is_refused_when_the_worker_starts(queue: Queue) -> None:
    """Its jobs would wait for nobody knows whom."""
    queue.crons.add(cron())
    queue.execute({"other": _work})
    with pytest.raises(ValueError, match="no handler"):
        await queue.start()


def test_a_storage_that_keeps_none_says_so_where_it_is_declared() -> None:
    """Nothing is connected for that."""
    queue = Queue(open_storage("bull+redis://127.0.0.1:1"))
    with pytest.raises(Unsupported, match="keeps nothing that recurs"):
        queue.crons.add(cron())


async def _work(job: Job) -> None:
    """Do nothing."""


async def test_workers_store_and_tick_what_their_process_declared(
    caplog: pytest.LogCaptureFixture, harness: Harness
) -> None:
    """Two of them, on each storage that keeps any: a job about every second, each once."""
    if not harness.capabilities.crons:
        pytest.skip("declared: crons")
    caplog.set_level(logging.ERROR)
    ran: list[str] = []
    done = asyncio.Event()

    async def work(job: Job) -> None:
        ran.append(job.id)
        if len(ran) == 2:
            done.set()

    name = harness.unique_queue()
    queues = [Queue(await harness.open(name)), Queue(await harness.open(name))]
    for queue in queues:
        queue.crons.add(every(timedelta(seconds=1)))
        queue.execute({"work": work})
        await queue.start()
    async with asyncio.timeout(PATIENCE):
        while not done.is_set():
            await asyncio.sleep(0.05)
            if harness.moves_time:
                await harness.advance(timedelta(milliseconds=50))
    for queue in queues:
        await queue.stop()
    assert len(set(ran)) == len(ran)
    assert caplog.text == ""
