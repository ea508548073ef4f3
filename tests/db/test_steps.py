"""Transactions in one step: their turns among others of the process, their cancellation, and their end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import Connection, insert, select, update
from sqlmodel import col

from db import BlacklistedServer, Database, DeliveryJob, engines
from db.migrate import upgrade
from tests.patience import PATIENCE_SECONDS

NOW = datetime(2025, 1, 1, tzinfo=UTC)


@pytest.fixture
async def sqlite(sqlite_url: str) -> AsyncIterator[Database]:
    upgrade(sqlite_url)
    database = Database(sqlite_url)
    yield database
    await database.close()


def insert_decision(connection: Connection, name: str) -> None:
    row = BlacklistedServer(id=name, server_url=f"https://{name}.example", created_at=NOW, reason="spam")
    connection.execute(insert(BlacklistedServer).values(row.model_dump()))


async def names(database: Database) -> list[str]:
    return [
        row.id for row in await database.rows(select(col(BlacklistedServer.id)).order_by(col(BlacklistedServer.id)))
    ]


def increment(connection: Connection) -> None:
    attempts = connection.execute(select(col(DeliveryJob.attempts))).scalar_one()
    connection.execute(update(DeliveryJob).values(attempts=attempts + 1))


async def test_both_kinds_of_transactions_take_turns(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither meets the lock of the other, which is fatal here, where nobody waits for it; no update is lost."""
    monkeypatch.setattr(engines, "_BUSY_TIMEOUT", timedelta(0))
    upgrade(sqlite_url)
    database = Database(sqlite_url)
    async with database.transaction() as session:
        session.add(DeliveryJob(id="d", target_url="t", payload="p", created_at=NOW))

    async def in_session() -> None:
        async with database.transaction() as session:
            await (await session.connection()).run_sync(increment)

    await asyncio.gather(*(in_session() if number % 2 else database.transact(increment) for number in range(64)))
    assert [row.attempts for row in await database.rows(select(col(DeliveryJob.attempts)))] == [64]
    await database.close()


async def test_one_cancelled_before_its_turn_does_nothing(sqlite: Database) -> None:
    """And the next has the turn as soon as whoever holds it is done."""
    async with sqlite.transaction() as session:
        await (await session.connection()).run_sync(insert_decision, name="a")
        waiting = asyncio.create_task(sqlite.transact(partial(insert_decision, name="b")))
        following = asyncio.create_task(sqlite.transact(partial(insert_decision, name="c")))
        assert not (await asyncio.wait({waiting, following}, timeout=0.05))[0]
        waiting.cancel()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await following
    assert waiting.cancelled()
    assert await names(sqlite) == ["a", "c"]


async def test_one_cancelled_at_work_leaves_the_next_unharmed(sqlite: Database) -> None:
    """Its thread finishes what it began, as a whole, and then serves whoever comes after it; nobody else is served."""
    begun, finish = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def stay(connection: Connection) -> None:
        insert_decision(connection, "a")
        loop.call_soon_threadsafe(begun.set)
        assert finish.wait(PATIENCE_SECONDS)
        insert_decision(connection, "b")

    cancelled = asyncio.create_task(sqlite.transact(stay))
    await begun.wait()
    cancelled.cancel()
    (outcome,) = await asyncio.gather(cancelled, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError)
    given_up, following = (
        asyncio.create_task(sqlite.transact(partial(insert_decision, name=name))) for name in ("c", "d")
    )
    assert not (await asyncio.wait({given_up, following}, timeout=0.05))[0]
    given_up.cancel()
    assert await names(sqlite) == []
    finish.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await following
    assert await names(sqlite) == ["a", "b", "d"]


async def test_a_closed_database_says_so(database: Database) -> None:
    """Whatever is asked of it, used before or not: a thread or a connection opened then would be left behind."""

    async def transaction() -> None:
        async with database.transaction():
            pass

    async def read() -> None:
        async with database.read():
            pass

    assert await names(database) == []
    await database.close()
    for use in (
        transaction(),
        read(),
        database.transact(partial(insert_decision, name="a")),
        database.rows(select(col(BlacklistedServer.id))),
    ):
        with pytest.raises(RuntimeError, match="is closed"):
            await use
