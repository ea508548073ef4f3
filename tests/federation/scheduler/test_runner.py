"""Running recurring jobs: outcomes, timeouts, takeovers, stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

import pytest
from sqlalchemy import update
from structlog.testing import capture_logs

from db import Database, RunOutcome, SchedulerJob
from federation.scheduler.leases import Leases, last_runs
from federation.scheduler.runner import JobRunner, RecurringJob, Scheduler
from tests.patience import PATIENCE_SECONDS, until

HOUR = timedelta(hours=1)

Work = Callable[[], Awaitable[Mapping[str, object]]]


def recurring(run: Work, *, name: str = "job", interval: timedelta = HOUR, timeout: timedelta = HOUR) -> RecurringJob:
    return RecurringJob(name=name, does="something", interval=interval, run=run, timeout=timeout)


def runner(database: Database, *, lease: timedelta = timedelta(seconds=30)) -> JobRunner:
    return JobRunner(Leases(database, holder="p", duration=lease))


async def three() -> Mapping[str, object]:
    return {"rows": 3}


async def test_a_run_is_logged_and_noted(database: Database) -> None:
    """With what the job says of it; the next is not due before the interval is over, unless it is asked for."""
    run = runner(database)
    with capture_logs() as logs:
        done = await run(recurring(three))
    assert done is not None
    assert (done.outcome, done.detail) == (RunOutcome.DONE, {"rows": 3})
    (line,) = logs
    assert (line["event"], line["job"], line["outcome"], line["rows"]) == ("scheduler_job", "job", "done", 3)
    (row,) = await last_runs(database)
    assert (row.outcome, row.detail, row.leased_until) == (RunOutcome.DONE, '{"rows": 3}', None)
    assert await run(recurring(three)) is None
    assert await run(recurring(three), at_once=True) is not None


async def test_nothing_is_begun_before_what_it_waits_for(database: Database) -> None:
    """Its error is the caller's, who tries again; no lease was taken meanwhile."""
    answers = iter([ConnectionError("away"), None])

    async def ready() -> None:
        if (error := next(answers)) is not None:
            raise error

    run = JobRunner(Leases(database, holder="p"), ready=ready)
    with pytest.raises(ConnectionError, match="away"):
        await run(recurring(three))
    assert await last_runs(database) == []
    assert await run(recurring(three)) is not None


async def test_a_job_that_fails_is_noted_without_its_message(database: Database) -> None:
    """Which may quote what must not be logged; it is tried again when it is due."""

    async def fail() -> Mapping[str, object]:
        raise ValueError("s3cret")

    with capture_logs() as logs:
        failed = await runner(database)(recurring(fail))
    assert failed is not None
    assert failed.outcome is RunOutcome.FAILED
    (row,) = await last_runs(database)
    assert row.detail == '{"error": "ValueError"}'
    (line,) = [entry for entry in logs if entry["event"] == "scheduler_job_failed"]
    assert line["error_type"] == "ValueError"
    assert "in fail\n" in line["stack"]
    assert "exc_info" not in line
    assert await runner(database)(recurring(three), at_once=True) is not None


async def test_a_job_that_hangs_is_cut_off(database: Database) -> None:
    """After its timeout; its work is cancelled."""
    cancelled = asyncio.Event()

    async def hang() -> Mapping[str, object]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return {}

    with capture_logs():
        failed = await runner(database)(recurring(hang, timeout=timedelta(milliseconds=50)))
    assert failed is not None
    assert failed.outcome is RunOutcome.FAILED
    assert cancelled.is_set()


async def test_a_run_that_was_taken_over_stops(database: Database) -> None:
    """A process that was suspended past its lease gives up its work when it hears of it."""
    began = asyncio.Event()

    async def work() -> Mapping[str, object]:
        began.set()
        await asyncio.Event().wait()
        return {}

    with capture_logs():
        running = asyncio.create_task(runner(database, lease=timedelta(milliseconds=90))(recurring(work)))
        await began.wait()
        async with database.transaction() as session:
            await session.execute(update(SchedulerJob).values(token=SchedulerJob.token + 1))
        async with asyncio.timeout(PATIENCE_SECONDS):
            lost = await running
    assert lost is not None
    assert lost.outcome is RunOutcome.LOST


async def test_a_long_run_keeps_its_lease(database: Database) -> None:
    """Nobody else gets the job while it runs, however many times longer than a lease that is."""
    lease = timedelta(seconds=4)  # a shorter one is lost on a slow machine
    other = Leases(database, holder="other")
    attempts: list[object] = []

    async def work() -> Mapping[str, object]:
        for _ in range(4):
            await asyncio.sleep(lease.total_seconds() / 2)
            attempts.append(await other.take("job", interval=timedelta(0)))
        return {}

    with capture_logs():
        done = await runner(database, lease=lease)(recurring(work))
    assert done is not None
    assert done.outcome is RunOutcome.DONE
    assert attempts == [None] * 4


async def test_a_scheduler_runs_its_jobs_until_it_is_stopped(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again; a stop cuts off what runs, which is no error, and leaves the job to the next process at once."""
    runs = 0
    twice = asyncio.Event()

    async def work() -> Mapping[str, object]:
        nonlocal runs
        runs += 1
        if runs == 2:
            twice.set()
            await asyncio.Event().wait()
        return {}

    job = recurring(work, interval=timedelta(milliseconds=50))
    scheduler = Scheduler([job], runner(database))
    with capture_logs():
        scheduler.start()
        scheduler.start()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await twice.wait()
        await scheduler.stop()
        await scheduler.stop()
        assert await runner(database)(recurring(three), at_once=True) is not None
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_job_that_outlasts_its_interval_is_not_begun_again(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is due meanwhile, which is nothing to warn of; other jobs keep their times."""
    slow_runs = 0
    quick_runs = 0
    often = asyncio.Event()

    async def slow() -> Mapping[str, object]:
        nonlocal slow_runs
        slow_runs += 1
        await asyncio.Event().wait()
        return {}

    async def quick() -> Mapping[str, object]:
        nonlocal quick_runs
        quick_runs += slow_runs
        if quick_runs >= 5:
            often.set()
        return {}

    interval = timedelta(milliseconds=20)
    jobs = [recurring(slow, name="slow", interval=interval), recurring(quick, name="quick", interval=interval)]
    scheduler = Scheduler(jobs, runner(database))
    with capture_logs():
        scheduler.start()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await often.wait()
        await scheduler.stop()
    assert slow_runs == 1
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_stop_is_no_error_for_jobs_that_are_just_due(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Whenever it comes: so many steps of the loop after the start, and when two have run. What has not begun does not
    begin.
    """
    steps = range(0, 100, 5) if database.is_sqlite else ()  # which are the loop's own, whatever the database
    for number in (*steps, None):
        often = timedelta(milliseconds=50 if number is None else 1)
        jobs = [recurring(three, name=f"job-{each}", interval=often) for each in range(10)]
        scheduler = Scheduler(jobs, runner(database))
        with capture_logs() as logs:
            scheduler.start()
            for _ in range(number or 0):
                await asyncio.sleep(0)
            if number is None:
                await until(lambda logs=logs: len(logs) >= 2)
            await scheduler.stop()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_database_that_is_away_is_logged_and_tried_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The scheduler goes on."""
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('empty')}/no-tables.db")
    scheduler = Scheduler([recurring(three, interval=timedelta(milliseconds=20))], runner(database))
    try:
        with capture_logs() as logs:
            scheduler.start()
            await until(lambda: len(logs) >= 2)
            await scheduler.stop()
    finally:
        await database.close()
    assert {entry["event"] for entry in logs} == {"scheduler_job_not_taken"}
