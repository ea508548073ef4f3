"""The audit log is written with what it tells of, or not at all; on SQLite and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Row, select, update
from sqlmodel import col

from db import ActionSource, AdminAction, Database, Server
from federation.admin.servers import servers
from federation.base.audit import UNRECORDED, Order, recorded
from federation.retention import Purge

PEER = "https://peer.example"
ORDER = Order(actor="alice", source=ActionSource.CLI, action="test", arguments={"ids": ("a",), "all": False})


async def log_of(database: Database) -> Sequence[Row[*tuple[Any, ...]]]:
    columns = ("affected", "finished_at", "error", "arguments")
    return await database.rows(select(*(col(getattr(AdminAction, name)) for name in columns)).order_by("id"))


async def test_a_transaction_that_fails_leaves_no_note(database: Database) -> None:
    """The key cannot be accepted, so nobody has accepted it."""
    now = datetime.now(UTC)
    async with database.transaction() as session:
        session.add(
            Server(
                url=PEER,
                public_key="A",
                encryption_public_key="B",
                last_seen=now,
                created_at=now,
                updated_at=now,
                is_healthy=True,
            )
        )
    broken = Order(actor="alice", source="nowhere", action="x")  # type: ignore[arg-type] # the database refuses it
    with pytest.raises(Exception, match="nowhere"):
        await servers.forget(database, PEER, order=broken)
    assert await servers.show(database, PEER) is not None
    assert await log_of(database) == []
    assert await servers.forget(database, PEER, order=ORDER)
    [row] = await log_of(database)
    assert (row.affected, json.loads(row.arguments)) == (1, {"ids": ["a"]})


async def test_what_was_done_before_a_failure_is_on_record(database: Database) -> None:
    """Each transaction adds what it changed; the one that failed changed nothing."""
    record = UNRECORDED

    def fail(connection: Connection) -> None:
        record.add(connection, 7)
        raise ZeroDivisionError

    async def act() -> None:
        nonlocal record
        async with recorded(database, ORDER) as record:
            await database.transact(lambda connection: record.add(connection, 5))
            [under_way] = await log_of(database)
            assert (under_way.affected, under_way.finished_at) == (5, None)
            await database.transact(fail)

    with pytest.raises(ZeroDivisionError):
        await act()
    [row] = await log_of(database)
    assert (row.affected, row.error) == (5, "ZeroDivisionError")
    assert row.finished_at is not None


async def test_it_is_kept_for_a_year(database: Database) -> None:
    """The purge removes what is older."""
    for _ in range(2):
        async with recorded(database, ORDER):
            pass
    old = update(AdminAction).where(col(AdminAction.id) == 1).values(at=datetime.now(UTC) - timedelta(days=366))
    async with database.transaction() as session:
        await session.execute(old)
    assert (await Purge(database)())["actions"] == 1
    assert len(await log_of(database)) == 1
