"""Bulk jobs go on without whoever asked for them, and change each row once; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, insert, select, text, update
from sqlmodel import col

from db import ActionSource, BulkJob, BulkVerb, DeliveryJob, DeliveryState
from federation.admin.actions import list_actions
from federation.admin.deliveries import bulk_jobs
from federation.admin.deliveries.bulk_jobs import BulkJobs, BulkProgress
from federation.admin.deliveries.deliveries import Selection
from federation.base.audit import Order
from federation.base.queues.job_data import POST_JOB
from federation.runtime.composition import Federation
from tests import warm
from tests.federation.conftest import MakeSettings
from tests.patience import eventually

PEER, OTHER = "https://peer.example", "https://other.example"
ORDER = Order(actor="alice", source=ActionSource.DASHBOARD, action="deliveries retry")
FAILED = Selection(state=DeliveryState.FAILED)


@pytest.fixture
async def node(make_settings: MakeSettings, database_url: str) -> AsyncIterator[Federation]:
    node = Federation(make_settings(database_url=database_url))
    yield node
    await node.close()


async def fail(node: Federation, number: int) -> None:
    """Deliveries that were given up an hour ago."""
    before = datetime.now(UTC) - timedelta(hours=1)
    rows = [
        {
            "id": f"d{each:05}",
            "target_url": f"{PEER}/posts",
            "payload": "{}",
            "server_url": PEER,
            "job_name": POST_JOB,
            "state": DeliveryState.FAILED,
            "settled_at": before,
            "error_code": "HTTP_500",
            "created_at": before,
        }
        for each in range(number)
    ]
    async with node.database.transaction() as session:
        await session.execute(insert(DeliveryJob), rows)


async def count(node: Federation, state: DeliveryState) -> int:
    query = select(func.count()).select_from(DeliveryJob).where(col(DeliveryJob.state) == state)
    return int((await node.database.rows(query))[0][0])


async def set_jobs(node: Federation, **values: object) -> None:
    async with node.database.transaction() as session:
        await session.execute(update(BulkJob).values(values))


async def progress(jobs: BulkJobs, job: int) -> BulkProgress:
    found = await jobs.progress(job)
    assert found is not None
    return found


async def test_a_retry_is_done_by_whoever_looks_for_it(node: Federation) -> None:
    """Whoever asked sees how far it is, and the audit log says the same."""
    await fail(node, 50)
    jobs = BulkJobs(node)
    job = await jobs.start_deliveries(BulkVerb.RETRY, FAILED, order=ORDER)
    assert (await progress(jobs, job)).total is None
    assert (await jobs.tick(), await jobs.tick()) == (True, False)
    done = await progress(jobs, job)
    assert (done.done, done.total, done.result, done.error) == (50, 50, {"left": 0, "out_of_order": 0}, None)
    assert await count(node, DeliveryState.READY) == 50
    assert sum((await node.delivery_queue.counts()).values()) == 50
    [action] = (await list_actions(node.database)).actions
    assert (action.id, action.affected, action.actor) == (job, 50, "alice")
    assert action.finished_at is not None


async def test_what_failed_again_since_is_left_alone(node: Federation) -> None:
    """A job that goes on in another process must not retry for ever."""
    await fail(node, 3)
    jobs = BulkJobs(node)
    job = await jobs.start_deliveries(BulkVerb.RETRY, FAILED, order=ORDER)
    async with node.database.transaction() as session:
        again = update(DeliveryJob).where(col(DeliveryJob.id) == "d00001")
        await session.execute(again.values(settled_at=datetime.now(UTC)))
    await jobs.tick()
    assert (await progress(jobs, job)).done == 2


async def test_two_operators_on_the_same_rows(node: Federation) -> None:
    """Each row is changed, and counted, by one of them."""
    await fail(node, 60)
    jobs, others = BulkJobs(node), BulkJobs(node)
    one = await jobs.start_deliveries(BulkVerb.DROP, FAILED, order=ORDER)
    other = await others.start_deliveries(BulkVerb.DROP, Selection(server_url=PEER), order=ORDER)
    await asyncio.gather(jobs.tick(), others.tick())
    while await jobs.tick():
        pass
    assert (await progress(jobs, one)).done + (await progress(jobs, other)).done == 60
    assert await count(node, DeliveryState.FAILED) == 0


async def test_a_cancelled_job_is_not_begun(node: Federation) -> None:
    """And ends in the audit log."""
    await fail(node, 10)
    jobs = BulkJobs(node)
    job = await jobs.start_deliveries(BulkVerb.RETRY, FAILED, order=ORDER)
    assert (await jobs.cancel(job), await jobs.cancel(job)) == (True, False)
    assert await jobs.tick() is False
    found = await progress(jobs, job)
    assert (found.done, found.error) == (0, "cancelled")
    assert await count(node, DeliveryState.FAILED) == 10


async def test_a_job_that_is_cancelled_under_way_stops(node: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a part of its lease; a server that does not answer in time is not waited for."""
    monkeypatch.setattr(bulk_jobs, "LEASE", timedelta(milliseconds=60))
    jobs = BulkJobs(node)
    job = await jobs.start_deliveries(BulkVerb.RETRY, FAILED, order=ORDER)
    under_way = asyncio.Event()

    async def work(_row: object) -> dict[str, object]:
        under_way.set()
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(jobs, "_work", work)
    running = asyncio.create_task(jobs.tick())
    await under_way.wait()
    assert await jobs.cancel(job)
    assert await running
    assert (await progress(jobs, job)).error == "cancelled"


async def test_a_job_is_run_by_one_process_until_its_lease_is_over(node: Federation) -> None:
    """And given up if it ends no process well."""
    jobs = BulkJobs(node)
    job = await jobs.start_deliveries(BulkVerb.RETRY, FAILED, order=ORDER)
    await set_jobs(node, leased_until=datetime.now(UTC) + bulk_jobs.LEASE, token=3)
    assert await jobs.tick() is False
    await set_jobs(node, leased_until=datetime.now(UTC) - timedelta(seconds=1), token=bulk_jobs.MAX_CLAIMS)
    assert await jobs.tick() is True
    assert "never ended" in str((await progress(jobs, job)).error)


async def test_what_is_no_bulk_job_is_refused(node: Federation) -> None:
    jobs = BulkJobs(node)
    with pytest.raises(ValueError, match="import takes no such deliveries"):
        await jobs.start_deliveries(BulkVerb.IMPORT, FAILED, order=ORDER)
    many = Selection(ids=tuple(map(str, range(bulk_jobs.MAX_CHOSEN + 1))))
    with pytest.raises(ValueError, match="retry takes no such"):
        await jobs.start_deliveries(BulkVerb.RETRY, many, order=ORDER)
    assert await jobs.progress(1) is None


async def test_what_another_version_has_to_do_is_left_to_it(node: Federation) -> None:
    """Nothing is done for it, and it hides no job behind it."""
    await fail(node, 3)
    jobs = BulkJobs(node)
    await jobs.start_deliveries(BulkVerb.RETRY, FAILED, order=ORDER)
    async with node.database.transaction() as session:
        await session.execute(text("UPDATE bulk_jobs SET verb = 'hold'"))
    assert await jobs.tick() is False
    assert await count(node, DeliveryState.FAILED) == 3
    await jobs.start_deliveries(BulkVerb.RETRY, FAILED, order=ORDER)
    assert await jobs.tick() is True
    assert await count(node, DeliveryState.READY) == 3


RUNNER = """
import asyncio, os
from federation.admin.deliveries import bulk_jobs
from federation.admin.deliveries import bulk as deliveries_bulk
from federation.runtime.composition import Federation
from federation.base.settings.settings import Settings
deliveries_bulk.BulkDeliveries.__init__.__kwdefaults__["batch"] = 5
async def main():
    node = Federation(Settings.load())
    while True:
        await bulk_jobs.BulkJobs(node).tick()
        await asyncio.sleep(0.01)
asyncio.run(main())
"""


async def test_a_job_survives_kill_9(node: Federation, database_url: str) -> None:
    """At any moment: another process does the rest, and the count is that of the rows."""
    await fail(node, 400)
    jobs = BulkJobs(node)
    job = await jobs.start_deliveries(BulkVerb.RETRY, FAILED, order=ORDER)
    environment = {**os.environ, "BETTER_AUTH_URL": "https://a.example", "DATABASE_URL": database_url}
    runner = subprocess.Popen([warm.PYTHON, "-c", RUNNER], env=environment)
    try:
        await eventually(lambda: progress(jobs, job), lambda found: found.done >= 20)
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    halfway = await progress(jobs, job)
    assert halfway.done == await count(node, DeliveryState.READY)
    await set_jobs(node, leased_until=datetime.now(UTC) - timedelta(seconds=1))
    await jobs.tick()
    done = await progress(jobs, job)
    assert (done.done, done.total, done.error) == (400, 400, None)
    assert await count(node, DeliveryState.READY) == 400
