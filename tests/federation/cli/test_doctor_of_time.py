"""`federation doctor` on clocks, on recurring jobs that did not run, on gaps between sweeps and on an empty queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from db import DeliveryJob, ProcessClock, RunOutcome, SchedulerJob
from federation.admin.doctor import time_checks
from federation.admin.doctor.checks import Found, Verdict
from federation.admin.why import explain
from federation.delivery.held.sweep_times import GAP
from federation.runtime.composition import Federation
from federation.runtime.recurring_jobs import recurring_jobs
from federation.scheduler.leases import LEASE
from tests.federation.cli.elsewhere import PEER, at_work, owe
from tests.federation.conftest import MakeSettings

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture
async def node(make_settings: MakeSettings) -> AsyncIterator[Federation]:
    made = Federation(make_settings())
    yield made
    await made.close()


async def clock_of(node: Federation, *, ahead: timedelta, ago: timedelta = timedelta(0)) -> None:
    """A process has written down its time, that long ago by the database's."""
    now = datetime.now(UTC) - ago
    database_at = now if node.database.has_clock else now + ahead
    async with node.database.transaction() as session:
        session.add(ProcessClock(process="host:17", machine_at=now + ahead, database_at=database_at))


@pytest.mark.parametrize(
    ("ahead", "verdict"),
    [(timedelta(0), Verdict.OK), (timedelta(seconds=10), Verdict.WARNING), (6 * HOUR, Verdict.FAILURE)],
)
async def test_a_process_whose_clock_is_ahead_is_named(node: Federation, ahead: timedelta, verdict: Verdict) -> None:
    """Whichever machine it runs on: the doctor's own clock is right."""
    await clock_of(node, ahead=ahead)
    found = await time_checks.clock(node)
    assert (found.verdict, "host:17" in found.found) == (verdict, verdict is not Verdict.OK)


async def test_a_process_that_stopped_long_ago_has_no_clock(node: Federation) -> None:
    """What it wrote down is no news."""
    await clock_of(node, ahead=timedelta(0) if not node.database.has_clock else HOUR, ago=HOUR)
    assert (await time_checks.clock(node)).verdict is Verdict.OK


async def ran(node: Federation, **values: Any) -> Found:
    """What is said once every recurring job has just run well, but for the sweep, of which this is on record.

    A time is given by how far it is from now: values are made minutes before a test runs.
    """
    now = datetime.now(UTC)
    values = {name: now + value if isinstance(value, timedelta) else value for name, value in values.items()}
    usual = {"token": 1, "started_at": now, "finished_at": now, "outcome": RunOutcome.DONE, "detail": "{}"}
    async with node.database.transaction() as session:
        for job in recurring_jobs(node):
            session.add(SchedulerJob(name=job.name, **usual | (values if job.name == "outbox-sweep" else {})))
    return await time_checks.scheduler(node)


@pytest.mark.parametrize(
    "values",
    [
        {"started_at": -5 * MINUTE},
        {"started_at": 6 * HOUR},
        {"started_at": 6 * HOUR, "leased_until": 6 * HOUR},
        {"started_at": -HOUR, "leased_until": 6 * HOUR},
        {"started_at": -HOUR, "outcome": RunOutcome.FAILED, "detail": '{"error": "DataError"}'},
    ],
    ids=["long-ago", "yet-to-come", "leased-by-a-wrong-clock", "leased-for-too-long", "failed-and-not-since"],
)
async def test_a_job_that_did_not_run_when_it_was_due_is_named(node: Federation, values: dict[str, Any]) -> None:
    """Whoever holds its lease, and however its last run ended."""
    found = await ran(node, **values)
    assert (found.verdict, "not run when they were due: outbox-sweep" in found.found) == (Verdict.WARNING, True)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"started_at": -5 * MINUTE, "leased_until": LEASE / 2},
        {"outcome": RunOutcome.FAILED, "detail": '{"error": "its process was stopped"}'},
    ],
    ids=["just-now", "running", "stopped"],
)
async def test_a_job_that_runs_or_was_stopped_is_well(node: Federation, values: dict[str, Any]) -> None:
    """A run may take as long as its timeout, and the next one is another process's."""
    assert (await ran(node, **values)).verdict is Verdict.OK


async def test_a_gap_between_sweeps_is_told_while_it_spares_anything(node: Federation) -> None:
    """With the command that ends it."""
    assert (await time_checks.sweeps(node)).verdict is Verdict.NOTE
    now = datetime.now(UTC)
    await node.sweeps.begin(now - 2 * GAP)
    await node.sweeps.begin(now)
    found = await time_checks.sweeps(node)
    assert (found.verdict, "deliveries expire" in found.advice) == (Verdict.WARNING, True)
    await node.sweeps.believe(now)
    assert (await time_checks.sweeps(node)).verdict is Verdict.OK


async def test_a_queue_without_jobs_for_what_is_ready_is_told(node: Federation) -> None:
    """By the doctor and by `why`, which then does not say that deliveries are on the way."""
    ids = await owe(node, 2)
    async with node.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(queued_at=datetime.now(UTC) - 2 * MINUTE))
    assert (await time_checks.sweeps(node)).verdict is Verdict.NOTE
    assert "no process that delivers runs" in "".join((await explain(node, PEER)).sentences())
    await at_work(node)
    assert "on the way" in "".join((await explain(node, PEER)).sentences())
    await node.delivery_queue.storage.remove(ids)
    found = await time_checks.sweeps(node)
    assert (found.verdict, "no job in the queue" in found.found) == (Verdict.WARNING, True)
    told = "".join((await explain(node, PEER)).sentences())
    assert ("on the way" in told, "no job is in the queue" in told) == (False, True)
