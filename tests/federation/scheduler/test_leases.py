"""Leases of recurring jobs: one holder at a time, also when one of them is suspended; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from db import Database, RunOutcome, SchedulerJob
from federation.scheduler.leases import Leases, last_runs

HOUR = timedelta(hours=1)
NOW = timedelta(0)


async def age(database: Database, by: timedelta, *, running: bool = True) -> None:
    """As if what is noted of every job had happened that much earlier."""
    (row,) = await last_runs(database)
    values: dict[str, object] = {"started_at": row.started_at and row.started_at - by}
    if running and row.leased_until is not None:
        values["leased_until"] = row.leased_until - by
    async with database.transaction() as session:
        await session.execute(update(SchedulerJob).values(values))


async def test_one_of_many_takes_a_job(database: Database) -> None:
    """Of twenty processes that try at once, also for the first time ever."""
    others = [Leases(database, holder=f"process-{number}") for number in range(20)]
    taken = await asyncio.gather(*(leases.take("job", interval=NOW) for leases in others))
    assert len([lease for lease in taken if lease is not None]) == 1


async def test_a_job_is_taken_again_when_its_interval_is_over(database: Database) -> None:
    """Counted from the start of its last run, and a little early, because timers are."""
    leases = Leases(database, holder="p")
    lease = await leases.take("job", interval=HOUR)
    assert lease is not None
    assert await leases.end(lease, RunOutcome.DONE, "{}")
    assert await leases.take("job", interval=HOUR) is None
    await age(database, HOUR / 2)
    assert await leases.take("job", interval=HOUR) is None
    await age(database, HOUR / 2.2)
    again = await leases.take("job", interval=HOUR)
    assert again is not None
    assert again.token == lease.token + 1


async def test_a_running_job_is_nobody_elses_until_its_lease_ends(database: Database) -> None:
    """Whatever the interval; a holder that died is replaced."""
    first, second = Leases(database, holder="a"), Leases(database, holder="b")
    assert await first.take("job", interval=NOW) is not None
    assert await second.take("job", interval=NOW) is None
    await age(database, 2 * first.duration)
    assert await second.take("job", interval=NOW) is not None


@pytest.mark.parametrize("ahead", [timedelta(minutes=1), timedelta(hours=6), timedelta(days=7)])
@pytest.mark.parametrize("is_running", [True, False])
async def test_a_clock_that_was_ahead_keeps_no_job_from_running(
    database: Database, ahead: timedelta, is_running: bool
) -> None:
    """No lease ends as late as it wrote, and no run has begun yet that is to come."""
    leases = Leases(database, holder="a")
    lease = await leases.take("job", interval=HOUR)
    assert lease is not None
    if not is_running:
        await leases.end(lease, RunOutcome.DONE, "{}")
    await age(database, -ahead)
    assert await Leases(database, holder="b").take("job", interval=HOUR) is not None


@pytest.mark.parametrize("is_running", [True, False])
async def test_clocks_that_differ_a_little_take_turns_all_the_same(database: Database, is_running: bool) -> None:
    """What the process with the faster clock wrote seems to have been written a moment from now."""
    leases = Leases(database, holder="a")
    lease = await leases.take("job", interval=HOUR)
    assert lease is not None
    if not is_running:
        await leases.end(lease, RunOutcome.DONE, "{}")
    await age(database, -timedelta(seconds=2))
    assert await Leases(database, holder="b").take("job", interval=HOUR) is None


async def test_a_renewed_lease_goes_on(database: Database) -> None:
    """From the renewal, for its whole duration."""
    leases = Leases(database, holder="a")
    lease = await leases.take("job", interval=NOW)
    assert lease is not None
    await age(database, leases.duration)
    assert await leases.renew(lease)
    assert await Leases(database, holder="b").take("job", interval=NOW) is None


async def test_a_holder_that_was_suspended_finds_the_job_taken(database: Database) -> None:
    """It can neither renew nor write how its run ended."""
    late, prompt = Leases(database, holder="late"), Leases(database, holder="prompt")
    lease = await late.take("job", interval=NOW)
    assert lease is not None
    await age(database, 2 * late.duration)
    taken = await prompt.take("job", interval=NOW)
    assert taken is not None
    assert not await late.renew(lease)
    assert not await late.end(lease, RunOutcome.DONE, '"late"')
    (row,) = await last_runs(database)
    assert (row.holder, row.outcome) == ("prompt", None)
    assert await prompt.end(taken, RunOutcome.DONE, '"prompt"')


async def test_the_last_run_of_every_job_can_be_read(database: Database) -> None:
    """When it began and ended, how, and what it said, cut to a thousand characters."""
    leases = Leases(database, holder="p")
    lease = await leases.take("job", interval=NOW)
    assert lease is not None
    await leases.end(lease, RunOutcome.FAILED, "x" * 5_000)
    (row,) = await last_runs(database)
    assert (row.name, row.outcome, row.detail, row.leased_until) == ("job", RunOutcome.FAILED, "x" * 1_000, None)
    assert row.started_at is not None
    assert row.finished_at is not None
    assert row.started_at <= row.finished_at
    assert abs(row.finished_at - datetime.now(UTC)) < timedelta(minutes=1)
