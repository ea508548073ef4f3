"""Jobs that follow others on PostgreSQL, where several of those others end at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from workers.errors import StorageUnavailable
from workers.jobs import Completed, JobState
from workers.storage.sql import SqlStorage
from workers.testing.steps import apply, claim, claim_one, enqueue, job, state, until

WAITS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
def database() -> str:
    return "postgres"


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_the_last_of_two_open_transactions_releases(
    storage: SqlStorage, engine: AsyncEngine, admin: psycopg.Connection, isolation: str
) -> None:
    """The second end waits until the first has committed, and sees that it is the last; or is undone, and repeated."""
    await enqueue(storage, job("one"), job("other"), replace(job("last"), after=("one", "other")))
    one, other = (Completed(claim=held, result=b"") for held in await claim(storage, 2))
    async with engine.connect() as first, engine.connect() as second:
        await second.execution_options(isolation_level=isolation)
        await storage.settle([one], connection=first)
        ending = asyncio.create_task(storage.settle([other], connection=second))
        await until(lambda: admin.execute(WAITS).fetchone() == (1,))
        await first.commit()
        if isolation == "READ COMMITTED":
            await ending
            await second.commit()
        else:
            with pytest.raises(StorageUnavailable):
                await ending
            await second.rollback()
            assert await state(storage, "last") is JobState.WAITING
            await apply(storage, other)
    assert (await claim_one(storage)).job_id == "last"


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_an_end_sees_who_began_to_follow_meanwhile(
    storage: SqlStorage, engine: AsyncEngine, admin: psycopg.Connection, isolation: str
) -> None:
    """An end waits for an open enqueue of a dependent and releases it; one that cannot see it is undone."""
    await enqueue(storage, job("one"), replace(job("earlier"), after=("one",)))
    one = Completed(claim=await claim_one(storage), result=b"")
    async with engine.connect() as first, engine.connect() as second:
        await second.execution_options(isolation_level=isolation)
        await storage.enqueue([replace(job("late"), after=("one",))], connection=first)
        ending = asyncio.create_task(storage.settle([one], connection=second))
        await until(lambda: admin.execute(WAITS).fetchone() == (1,))
        await first.commit()
        if isolation == "READ COMMITTED":
            await ending
            await second.commit()
        else:
            with pytest.raises(StorageUnavailable):
                await ending
            await second.rollback()
            await apply(storage, one)
    assert sorted(held.job_id for held in await claim(storage, 5)) == ["earlier", "late"]
