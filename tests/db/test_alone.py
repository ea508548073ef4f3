"""Single statements on PostgreSQL's driver: what they commit, and what becomes of their connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from psycopg import AsyncConnection
from sqlalchemy import QueuePool, text
from sqlalchemy.exc import DataError, IntegrityError, OperationalError

from db import Database, alone
from db.migrate import upgrade
from tests.servers import free_port

ADDED = "INSERT INTO delivery_payloads (id, payload, refs, created_at) VALUES (%(id)s, %(text)s, 1, now()) RETURNING id"
BACKEND = "SELECT pg_backend_pid() AS pid"


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    upgrade(postgres_url)
    opened = Database(postgres_url)
    yield opened
    await opened.close()
    assert pool(opened).checkedout() == 0


def pool(database: Database) -> QueuePool:
    pool = database._writer.sync_engine.pool
    assert isinstance(pool, QueuePool)
    return pool


async def backend(database: Database) -> int:
    [row] = await database.alone(BACKEND, {})
    return int(row.pid)


async def payloads(database: Database) -> list[str]:
    async with database.read() as session:
        return list((await session.execute(text("SELECT id FROM delivery_payloads ORDER BY id"))).scalars())


async def test_it_commits_by_itself_on_one_connection(database: Database) -> None:
    first = await backend(database)
    assert [row.id for row in await database.alone(ADDED, {"id": "a", "text": "t"})] == ["a"]
    assert await payloads(database) == ["a"]
    assert await backend(database) == first


async def test_what_the_server_refuses_is_an_error_without_the_row(database: Database) -> None:
    """And the connection goes back to the pool, as good as before."""
    first = await backend(database)
    await database.alone(ADDED, {"id": "a", "text": "secret"})
    with pytest.raises(IntegrityError) as refused:
        await database.alone(ADDED, {"id": "a", "text": "secret"})
    assert "secret" not in str(refused.value)
    assert "DETAIL" not in str(refused.value)
    with pytest.raises(DataError):
        await database.alone(ADDED, {"id": "b\x00", "text": "secret"})
    assert await backend(database) == first
    assert await payloads(database) == ["a"]


async def test_a_connection_that_is_lost_costs_one_statement(database: Database) -> None:
    lost = await backend(database)
    async with database.read() as session:
        await session.execute(text(f"SELECT pg_terminate_backend({lost})"))
    with pytest.raises(OperationalError):
        await backend(database)
    assert await backend(database) != lost


async def test_a_cancelled_statement_leaves_no_connection_behind(database: Database) -> None:
    """Whatever it was doing: the next one has another."""
    first = await backend(database)
    task = asyncio.create_task(database.alone("SELECT pg_sleep(60)", {}))
    while not await is_sleeping(database, first):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await backend(database) != first


async def test_a_connection_given_back_while_cancelled_is_closed(database: Database) -> None:
    """It is not forgotten between the statements and the pool."""
    await backend(database)
    driver = held(database)
    async with driver.lock:  # so that giving it back has to wait
        closing = asyncio.create_task(database.close())
        await asyncio.wait([closing], timeout=0.1)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert driver.closed


async def test_a_cancelled_close_leaves_nothing_to_the_statement_that_runs(database: Database) -> None:
    """Whoever closes may not wait; the statement then gives the connection back itself."""
    first = await backend(database)
    driver = held(database)
    task = asyncio.create_task(database.alone("SELECT pg_sleep(1)", {}))
    while not await is_sleeping(database, first):
        await asyncio.sleep(0)
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await task
    assert driver.closed


def held(database: Database) -> AsyncConnection[Any]:
    connection = database._alone._held
    assert connection is not None
    return cast("AsyncConnection[Any]", connection.driver_connection)


async def is_sleeping(database: Database, backend: int) -> bool:
    active = text(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid AND query LIKE '%pg_sleep%' AND state = 'active'"
    )
    async with database.read() as session:
        return bool((await session.execute(active, {"pid": backend})).scalar_one())


async def test_an_idle_connection_is_tried_before_it_is_used(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a server that was restarted meanwhile costs nothing."""
    monkeypatch.setattr(alone, "TRIED_AFTER_SECONDS", -1.0)
    first = await backend(database)
    assert await backend(database) == first
    async with database.read() as session:
        await session.execute(text(f"SELECT pg_terminate_backend({first})"))
    assert await backend(database) != first


async def test_a_server_that_is_away_is_told_of_in_full() -> None:
    """Nothing was sent, so no line of the error can quote it."""
    unreachable = Database(f"postgresql://node@127.0.0.1:{free_port()}/node")
    with pytest.raises(OperationalError) as refused:
        await unreachable.alone(ADDED, {"id": "a", "text": "secret"})
    assert "running on that host" in str(refused.value)
    assert "INSERT" not in str(refused.value)
    await unreachable.close()


async def test_statements_of_several_tasks_take_turns(database: Database) -> None:
    await asyncio.gather(*(database.alone(ADDED, {"id": f"{number:02}", "text": ""}) for number in range(20)))
    assert await payloads(database) == [f"{number:02}" for number in range(20)]
    assert pool(database).checkedout() == 1
