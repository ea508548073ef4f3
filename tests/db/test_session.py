"""Transactions and reads: atomicity, isolation between them, contention, cancellation, and a clean end."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, Insert, bindparam, event, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlmodel import col

from db import BlacklistedServer, Database, DeliveryJob, Post, create_host_tables, engines
from db.migrate import upgrade
from tests.patience import PATIENCE_SECONDS

NOW = datetime(2025, 1, 1, tzinfo=UTC)


def decision(name: str) -> BlacklistedServer:
    return BlacklistedServer(id=name, server_url=f"https://{name}.example", created_at=NOW, reason="spam")


async def count(database: Database) -> int:
    async with database.read() as session:
        return (await session.execute(select(func.count()).select_from(BlacklistedServer))).scalar_one()


async def test_a_transaction_commits_when_its_block_ends(database: Database) -> None:
    """Before the end nobody else sees the row; afterwards everybody does, and the object stays readable."""
    async with database.transaction() as session:
        row = decision("a")
        session.add(row)
        await session.flush()
        assert await count(database) == 0
    assert await count(database) == 1
    assert row.reason == "spam"


async def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    """The error comes out unchanged and the next transaction works."""

    async def fail() -> None:
        async with database.transaction() as session:
            session.add(decision("a"))
            await session.flush()
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert await count(database) == 0
    async with database.transaction() as session:
        session.add(decision("a"))
    assert await count(database) == 1


def insert_decision(connection: Connection, name: str) -> None:
    connection.execute(insert(BlacklistedServer).values(decision(name).model_dump()))


async def test_work_on_a_connection_is_committed_as_a_whole(database: Database) -> None:
    """Its result comes back once others see what it did; if it raises, nothing of it is left."""

    def add_two(connection: Connection) -> str:
        insert_decision(connection, "a")
        insert_decision(connection, "b")
        return "done"

    assert await database.transact(add_two) == "done"
    assert await count(database) == 2

    with pytest.raises(IntegrityError):
        await database.transact(lambda connection: [insert_decision(connection, name) for name in ("c", "a")])
    assert await count(database) == 2


async def test_a_query_of_its_own_sees_the_latest_commit(database: Database) -> None:
    """And nothing of what a writer that it does not wait for has not committed; there may be more than readers."""
    names = select(col(BlacklistedServer.id)).where(col(BlacklistedServer.id).in_(bindparam("ids", expanding=True)))
    await add(database, "a")
    async with database.transaction() as session:
        session.add(decision("b"))
        await session.flush()
        async with asyncio.timeout(PATIENCE_SECONDS):
            found = await asyncio.gather(*(database.rows(names, {"ids": ["a", "b"]}) for _ in range(40)))
    assert {tuple(row.id for row in rows) for rows in found} == {("a",)}
    assert {row.id for row in await database.rows(names, {"ids": ["a", "b"]})} == {"a", "b"}


async def test_a_read_session_cannot_write(database: Database) -> None:
    """The database itself refuses, and the connection's next transaction may write again."""
    with pytest.raises(DBAPIError, match=r"readonly|read-only"):
        async with database.read() as session:
            await session.execute(insert(BlacklistedServer).values(decision("a").model_dump()))
    async with database.transaction() as session:
        session.add(decision("a"))
    assert await count(database) == 1


async def test_a_transaction_inside_a_transaction_is_refused_at_once(database: Database) -> None:
    """Otherwise the inner one would wait for the outer one's lock until a timeout; other tasks are free to begin."""
    async with database.transaction() as session:
        with pytest.raises(RuntimeError, match="pass the outer session on"):
            async with database.transaction():
                pass
        with pytest.raises(RuntimeError, match="pass the outer session on"):
            await database.transact(lambda _: None)
        session.add(decision("a"))
        other = asyncio.create_task(add(database, "b"))
    await other
    assert await count(database) == 2


async def add(database: Database, name: str) -> None:
    async with database.transaction() as session:
        session.add(decision(name))


async def test_writers_that_read_first_lose_no_update(sqlite_url: str) -> None:
    """Sixty-four tasks increment one counter by read-then-write; two `Database` objects stand for two processes."""
    upgrade(sqlite_url)
    databases = [Database(sqlite_url), Database(sqlite_url)]
    async with databases[0].transaction() as session:
        session.add(DeliveryJob(id="d", target_url="t", payload="p", created_at=NOW))

    async def increment(database: Database) -> None:
        async with database.transaction() as session:
            attempts = (await session.execute(select(DeliveryJob.attempts))).scalar_one()
            await session.execute(update(DeliveryJob).values(attempts=attempts + 1))

    await asyncio.gather(*(increment(databases[number % 2]) for number in range(64)))
    async with databases[1].read() as session:
        assert (await session.execute(select(DeliveryJob.attempts))).scalar_one() == 64
    for database in databases:
        await database.close()


async def test_readers_go_on_while_a_writer_holds_the_lock(database: Database) -> None:
    """More readers than pooled connections finish inside an open write transaction."""
    async with database.transaction() as session:
        session.add(decision("a"))
        await session.flush()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await asyncio.gather(*(count(database) for _ in range(40))) == [0] * 40


async def test_a_cancelled_transaction_is_rolled_back_and_frees_its_connection(database: Database) -> None:
    """Cancelled with a statement sent and uncommitted, it leaves no row and no lock."""
    written = asyncio.Event()

    async def stay() -> None:
        async with database.transaction() as session:
            session.add(decision("a"))
            await session.flush()
            written.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(stay())
    await written.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(PATIENCE_SECONDS):
        await add(database, "b")
    assert await count(database) == 1


async def in_session(database: Database, work: Callable[[Connection], None]) -> None:
    async with database.transaction() as session:
        await (await session.connection()).run_sync(work)


@pytest.mark.parametrize("transact", [in_session, Database.transact], ids=["transaction", "transact"])
async def test_a_transaction_cancelled_in_a_statement_gives_up_the_lock_at_once(
    sqlite_url: str, transact: Callable[[Database, Callable[[Connection], None]], Coroutine[object, object, None]]
) -> None:
    """Also while somebody holds the exception that ended it, as a worker does until the job is settled."""
    upgrade(sqlite_url)
    database = Database(sqlite_url)
    under_way = asyncio.Event()

    def read_for_long(connection: Connection) -> None:
        event.listen(connection, "before_cursor_execute", lambda *_: under_way.set())
        numbers = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 1000000)"
        connection.execute(text(f"{numbers} SELECT count(*) FROM n"))

    reading = asyncio.create_task(transact(database, read_for_long))
    await under_way.wait()
    reading.cancel()
    (held,) = await asyncio.gather(reading, return_exceptions=True)
    assert isinstance(held, asyncio.CancelledError)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await add(database, "a")
    assert await count(database) == 1
    await database.close()


async def test_a_writer_cancelled_while_another_process_holds_the_lock_does_no_harm(sqlite_url: str) -> None:
    """Cancelled in the middle of `BEGIN IMMEDIATE`, it takes no lock with it into the pool."""
    upgrade(sqlite_url)
    database = Database(sqlite_url)
    await add(database, "a")
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(add(database, "b"))
    assert not (await asyncio.wait({waiting}, timeout=0.1))[0]
    waiting.cancel()
    other.execute("COMMIT")
    other.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(PATIENCE_SECONDS):
        await add(database, "c")
    assert await count(database) == 2
    await database.close()


async def test_a_failed_statement_shows_no_values(database: Database) -> None:
    """A duplicate id is named by its constraint; the payload beside it stays out of the message."""
    twice = [{"id": "d", "target_url": "t", "payload": "top-secret", "created_at": NOW}] * 2
    with pytest.raises(IntegrityError) as caught:
        async with database.transaction() as session:
            await session.execute(insert(DeliveryJob).values(twice))
    assert "top-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        insert(DeliveryJob).values(id="d", payload="top-secret", created_at=NOW),
        insert(Post).values(id="p", content=["top-secret \0"], published=NOW, created_at=NOW),
    ],
    ids=["row without a value", "text in JSON that cannot be stored"],
)
async def test_no_error_of_postgresql_quotes_the_row(postgres_url: str, row: Insert) -> None:
    """Nothing in the chain of exceptions holds the payload, though the server quotes it."""
    upgrade(postgres_url)
    database = Database(postgres_url)
    async with database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)

    with pytest.raises(DBAPIError) as caught:
        async with database.transaction() as session:
            await session.execute(row)
    await database.close()

    shown = "".join(map(str, (caught.value, caught.value.__cause__, caught.value.orig)))
    assert "psycopg" in shown
    assert "top-secret" not in shown


async def test_sqlite_connections_have_our_pragmas(sqlite_url: str) -> None:
    """WAL, synchronous NORMAL, foreign keys and a busy timeout."""
    upgrade(sqlite_url)
    database = Database(sqlite_url)
    async with database.transaction() as session:
        found = [
            (await session.execute(text(f"PRAGMA {name}"))).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    assert found == ["wal", 1, 1, 30_000]
    await database.close()


async def test_each_query_of_a_read_sees_the_latest_commit(database: Database) -> None:
    """A reader that stays open holds back neither writers nor its own view."""
    counted = select(func.count()).select_from(BlacklistedServer)
    async with database.read() as session:
        assert (await session.execute(counted)).scalar_one() == 0
        await add(database, "a")
        assert (await session.execute(counted)).scalar_one() == 1


async def test_connections_that_died_while_idle_are_replaced(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of the server (here: its backends are ended) the next transactions just work."""
    monkeypatch.setattr(engines, "_PING_AFTER", timedelta(0))
    upgrade(postgres_url)
    database, other = Database(postgres_url), Database(postgres_url)
    await asyncio.gather(*(add(database, str(number)) for number in range(5)))
    async with other.transaction() as session:
        end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        ended = await session.execute(text(f"{end} AND datname = current_database()"))
        assert len(ended.all()) > 0
    await asyncio.gather(
        *(add(database, f"after-{number}") for number in range(5)),
        *(database.transact(partial(insert_decision, name=f"once-{number}")) for number in range(5)),
        *(database.rows(select(col(BlacklistedServer.id))) for _ in range(5)),
    )
    assert await count(database) == 15
    await database.close()
    await other.close()


async def test_closing_leaves_no_connection_behind(database_url: str) -> None:
    """No warning about an unclosed resource (they are errors here); closing twice is fine, and so is never opening."""
    upgrade(database_url)
    for used in (True, False):
        database = Database(database_url)
        if used:
            await asyncio.gather(*(add(database, str(number)) for number in range(5)))
            assert await count(database) == 5
        await database.close()
        await database.close()
        del database
        gc.collect()


@pytest.mark.parametrize("kind", ["read", "transaction"])
async def test_what_is_still_in_use_is_closed_when_it_is_given_back(database_url: str, kind: str) -> None:
    """As by a task that was cancelled at the end, and had to undo something first."""
    upgrade(database_url)
    database = Database(database_url)
    async with getattr(database, kind)() as session:
        await session.execute(select(1))
        await database.close()
    del session, database
    gc.collect()


@pytest.mark.parametrize(("kind", "setting"), [("read", "set_read_only"), ("rows", "set_autocommit")])
async def test_a_task_cancelled_as_it_gets_a_connection_leaves_none_open(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch, kind: str, setting: str
) -> None:
    """psycopg lets the event loop run as it makes a connection read-only, or one that commits by itself."""
    database = Database(migrated_postgres_url)

    async def cancelled(*_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def look() -> None:
        if kind == "rows":
            await database.rows(select(1))
        async with database.read() as session:
            await session.execute(select(1))

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.AsyncConnection, setting, cancelled)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(look())
    await look()
    await database.close()
    gc.collect()


def test_closing_folds_the_write_ahead_log_into_the_file(sqlite_url: str) -> None:
    """After `close` the file alone is the database, so that it can be copied."""
    upgrade(sqlite_url)

    async def use() -> None:
        database = Database(sqlite_url)
        await add(database, "a")
        await database.close()

    asyncio.run(use())
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_importing_the_package_loads_neither_alembic_nor_a_driver() -> None:
    """A worker that never migrates does not pay for Alembic at start."""
    program = "import sys, db; print([m for m in ('alembic', 'aiosqlite', 'psycopg') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"
