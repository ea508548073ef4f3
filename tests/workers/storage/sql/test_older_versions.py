"""What a version left in the tables that kept no payload of a cancelled job, and what it makes of ours."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from sqlalchemy import Engine, text

from workers.jobs import Cancelled, EnqueueStatus, JobState
from workers.storage.sql import SqlStorage
from workers.testing.steps import LEASE, enqueue, job, status

BURY = (
    "UPDATE workers_jobs SET state = 'cancelled', token = NULL, finished_at = created_at,"
    " expires_at = created_at + 3600000 WHERE id IN ('old', 'again')",
    "DELETE FROM workers_payloads WHERE seq IN (SELECT seq FROM workers_jobs WHERE state = 'cancelled')",
)


async def test_a_tombstone_is_a_cancelled_job(storage: SqlStorage, outsider: Engine) -> None:
    """It is listed and counted with its time, but not retried: there is nothing left to run."""
    await enqueue(storage, job("old"), job("again"))
    with outsider.connect() as connection:
        for statement in BURY:
            connection.execute(text(statement))
    found = await status(storage, "old")
    assert (found.state, found.finished_at) == (JobState.CANCELLED, found.created_at)
    assert (await storage.counts())[JobState.CANCELLED] == 2
    assert await storage.retry(["old"]) == 0
    assert [one.status for one in await storage.enqueue([job("again", payload=b"new")])] == [EnqueueStatus.QUEUED]
    (held,) = await storage.claim("w", leases={"*": LEASE}, limit=5)
    assert held.payload == b"new"
    assert await storage.clean(JobState.CANCELLED, older_than=timedelta(0)) == 1


async def test_older_versions_know_our_rows(storage: SqlStorage, outsider: Engine) -> None:
    """A cancelled job is as a tombstone was, with an end, whether it waited or ran: they sweep and replace it."""
    await enqueue(storage, job("ran"))
    (held,) = await storage.claim("w", leases={"*": LEASE}, limit=1)
    await enqueue(storage, job("waited"))
    await storage.cancel("waited")
    await storage.settle([Cancelled(claim=held)])
    with outsider.connect() as connection:
        rows = connection.execute(text("SELECT state, expires_at - finished_at, worker FROM workers_jobs")).all()
    assert rows == [("cancelled", 3_600_000, None)] * 2


async def test_what_older_versions_end_strands_nobody(storage: SqlStorage, outsider: Engine) -> None:
    """They know of no dependents: these are released by a trigger, at once or, on SQLite, with the next sweep."""
    await enqueue(storage, job("done"), job("bad"), job("gone"), job("kept"))
    await enqueue(storage, *(replace(job(f"after-{name}"), after=(name,)) for name in ("done", "bad", "gone", "kept")))
    ends = "finished_at = created_at, expires_at = created_at + 3600000 WHERE id ="
    with outsider.begin() as connection:
        connection.execute(text(f"UPDATE workers_jobs SET state = 'completed', {ends} 'done'"))
        connection.execute(text(f"UPDATE workers_jobs SET state = 'failed', {ends} 'bad'"))
        connection.execute(text("DELETE FROM workers_jobs WHERE id = 'gone'"))
    await storage.sweep(10)
    found = await storage.status([f"after-{name}" for name in ("done", "bad", "gone", "kept")])
    assert [one and one.state for one in found] == [
        JobState.QUEUED,
        JobState.FAILED,
        JobState.FAILED,
        JobState.WAITING,
    ]
