"""Jobs that are enqueued in the caller's own transaction."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlmodel.ext.asyncio.session import AsyncSession as SqlModelSession

from tests.workers.storage.sql.steps import MINUTE, claim_all, connected, ids, on_postgres, on_sqlite
from workers.errors import StorageError, StorageUnavailable, TransactionError
from workers.jobs import EnqueueStatus, JobEventKind
from workers.storage.sql import SqlStorage
from workers.storage.sql import caller as sql_caller
from workers.testing.steps import PATIENCE, job, until


@on_sqlite
async def test_jobs_of_a_committed_transaction_are_there(storage: SqlStorage, engine: AsyncEngine) -> None:
    """A job enqueued in the caller's transaction is unseen until the commit, and claimable after it."""
    async with AsyncSession(engine) as session:
        [result] = await storage.enqueue([job("a")], connection=session)
        assert result.status is EnqueueStatus.QUEUED
        assert await storage.status(["a"]) == [None]
        await session.commit()
    assert await ids(storage) == ["a"]


@on_sqlite
async def test_jobs_of_a_rolled_back_transaction_never_were(storage: SqlStorage, engine: AsyncEngine) -> None:
    """A rollback takes the jobs with the caller's other writes, and wakes nobody."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=timedelta(milliseconds=300)))
    started = time.monotonic()
    async with AsyncSession(engine) as session:
        await storage.enqueue([job("a")], connection=session)
        await session.rollback()
    await waiting
    assert time.monotonic() - started >= 0.29
    assert await ids(storage) == []


@on_sqlite
@pytest.mark.parametrize("kind", ["AsyncSession", "SQLModel", "AsyncConnection"])
async def test_asynchronous_connections_are_accepted(storage: SqlStorage, engine: AsyncEngine, kind: str) -> None:
    """Sessions of SQLAlchemy and SQLModel and bare connections all carry jobs."""
    kinds = {"AsyncSession": AsyncSession, "SQLModel": SqlModelSession, "AsyncConnection": AsyncConnection}
    async with kinds[kind](engine) as connection:
        await storage.enqueue([job("a")], connection=connection)
        await connection.commit()
    assert await ids(storage) == ["a"]


@on_postgres
@pytest.mark.parametrize("kind", [AsyncSession, AsyncConnection])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_jobs_share_the_fate_of_the_callers_transaction(
    storage: SqlStorage, engine: AsyncEngine, kind: type[AsyncSession] | type[AsyncConnection], ending: str
) -> None:
    """Jobs and other writes of the caller appear together, waking waiters, or never were; nobody waits meanwhile."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    async with kind(engine) as connection:
        [result] = await storage.enqueue([job("a")], connection=connection)
        assert result.status is EnqueueStatus.QUEUED
        await storage.enqueue([job("beside", name="other")])
        assert await storage.status(["a"]) == [None]
        assert not waiting.done()
        await (connection.commit() if ending == "commit" else connection.rollback())
    if ending == "commit":
        await asyncio.wait_for(waiting, PATIENCE)
    waiting.cancel()
    assert await ids(storage) == (["beside"] if ending == "rollback" else ["a", "beside"])


@pytest.mark.parametrize("kind", ["Session", "Connection"])
async def test_synchronous_connections_are_accepted(storage: SqlStorage, sync_engine: Engine, kind: str) -> None:
    """A synchronous session or connection is used where the caller is."""
    with Session(sync_engine) if kind == "Session" else sync_engine.connect() as connection:
        await storage.enqueue([job("a\x00\x01")], connection=connection)
        connection.commit()
    assert await ids(storage) == ["a\x00\x01"]


@on_sqlite
@pytest.mark.usefixtures("no_watcher")
async def test_the_commit_wakes_waiters_at_once(storage: SqlStorage, engine: AsyncEngine) -> None:
    """A waiter of this process hears of a session's commit from the session, not by looking, and not before it."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    async with AsyncSession(engine) as session, session.begin():
        await storage.enqueue([job("a")], connection=session)
        async with session.begin_nested():
            await session.execute(text("SELECT 1"))
        await storage.status(["a"])
        assert not waiting.done()
    await asyncio.wait_for(waiting, PATIENCE)
    assert await ids(storage) == ["a"]


@on_sqlite
async def test_a_bare_connections_commit_wakes_waiters(storage: SqlStorage, engine: AsyncEngine) -> None:
    """A connection that tells nobody of its commit is noticed by the watcher."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    async with engine.connect() as connection:
        await storage.enqueue([job("a")], connection=connection)
        await connection.commit()
    await asyncio.wait_for(waiting, PATIENCE)
    assert await ids(storage) == ["a"]


async def test_events_of_the_callers_transaction_follow_its_commit(storage: SqlStorage, engine: AsyncEngine) -> None:
    """Subscribers hear of a job that came in by a caller's transaction, and of none that was rolled back."""
    async with storage.events() as events, AsyncSession(engine) as session:
        await storage.enqueue([job("gone")], connection=session)
        await session.rollback()
        await storage.enqueue([job("there")], connection=session)
        await session.commit()
        heard = await asyncio.wait_for(events.get(), PATIENCE)
    assert (heard.kind, heard.job_id) == (JobEventKind.QUEUED, "there")


@on_postgres
async def test_who_subscribes_after_the_enqueue_hears_of_the_commit(storage: SqlStorage, engine: AsyncEngine) -> None:
    """Who subscribed before the commit hears of the job, even if after the enqueue."""
    async with AsyncSession(engine) as session:
        await storage.enqueue([job("a")], connection=session)
        async with storage.events() as events:
            await session.commit()
            heard = await asyncio.wait_for(events.get(), PATIENCE)
    assert (heard.kind, heard.job_id) == (JobEventKind.QUEUED, "a")


async def test_a_connection_of_another_database_is_refused(
    storage: SqlStorage, postgres_server: str, tmp_path: Path
) -> None:
    """Jobs never go to a database other than the storage's."""
    for url in (postgres_server, f"sqlite+aiosqlite:///{tmp_path}/other.db"):
        other = create_async_engine(url)
        async with other.connect() as connection:
            with pytest.raises(StorageError, match="another database"):
                await storage.enqueue([job("a")], connection=connection)
        await other.dispose()
    with pytest.raises(TypeError, match="connection must be"):
        await storage.enqueue([job("a")], connection="nonsense")


@on_sqlite
async def test_writing_beside_the_own_transaction_is_refused_at_once(storage: SqlStorage, engine: AsyncEngine) -> None:
    """What would wait for the task's own write lock raises instead; reading and other tasks are free to go on."""
    async with AsyncSession(engine) as session:
        await storage.enqueue([job("a")], connection=session)
        with pytest.raises(TransactionError, match="connection="):
            await storage.enqueue([job("b")])
        with pytest.raises(TransactionError):
            await claim_all(storage)
        assert await storage.status(["a"]) == [None]
        elsewhere = asyncio.create_task(storage.enqueue([job("c")]))
        await storage.enqueue([job("b")], connection=session)
        await session.commit()
        await elsewhere
        await storage.enqueue([job("d")])
    assert sorted(await ids(storage)) == ["a", "b", "c", "d"]


@on_sqlite
async def test_a_slow_transaction_is_warned_about_once(
    storage: SqlStorage, engine: AsyncEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction left open after its enqueues shows in the log, one line however many jobs it holds."""
    monkeypatch.setattr(sql_caller, "SLOW_TRANSACTION", timedelta(milliseconds=20))
    with caplog.at_level(logging.WARNING, logger="workers"):
        async with AsyncSession(engine) as session:
            await storage.enqueue([job("a")], connection=session)
            await storage.enqueue([job("b")], connection=session)
            await until(lambda: caplog.records)
            await asyncio.sleep(0.05)
            await session.commit()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@on_sqlite
async def test_a_stale_transaction_says_what_to_do(storage: SqlStorage, sync_engine: Engine) -> None:
    """A deferred transaction that read before another commit cannot write; the error says so and how to go on."""
    listening = sync_engine.connect()
    listening.exec_driver_sql("BEGIN")
    listening.exec_driver_sql("SELECT count(*) FROM workers_jobs").all()
    await storage.enqueue([job("a")])
    with pytest.raises(StorageUnavailable, match="roll that back"):
        await storage.enqueue([job("b")], connection=listening)
    listening.close()


@on_sqlite
async def test_the_write_lock_is_taken_before_anything_is_read(
    storage: SqlStorage, sync_engine: Engine, url: str
) -> None:
    """In a transaction that began as a reading one, no other connection can write between our look and our write."""
    other = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)
    refused: list[str] = []

    def write_now(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("SELECT"):
            with pytest.raises(sqlite3.OperationalError):
                other.execute("BEGIN IMMEDIATE")
            refused.append(statement)

    event.listen(sync_engine, "before_cursor_execute", write_now)
    with sync_engine.connect() as connection:
        await storage.enqueue([job("a")], connection=connection)
        connection.commit()
    other.close()
    assert refused


@on_postgres
async def test_an_enqueue_waits_for_the_same_id_in_an_open_transaction(postgres_url: str, engine: AsyncEngine) -> None:
    """Whether the other one commits decides; after `busy_timeout` the answer is that nothing is known."""
    await SqlStorage(postgres_url).migrate()
    async with (
        connected(SqlStorage(postgres_url, busy_timeout=timedelta(milliseconds=300))) as storage,
        AsyncSession(engine) as session,
    ):
        await storage.enqueue([job("a")], connection=session)
        blocked = [asyncio.create_task(storage.enqueue([job("a")])) for _ in range(3)]
        assert await asyncio.wait_for(claim_all(storage), PATIENCE) == []
        outcomes = await asyncio.gather(*blocked, return_exceptions=True)
        assert all(isinstance(outcome, StorageUnavailable) for outcome in outcomes)
        await session.commit()
        [result] = await storage.enqueue([job("a")])
    assert result.status is EnqueueStatus.DUPLICATE
