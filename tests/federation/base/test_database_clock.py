"""The time that processes share: the database's on PostgreSQL, the machine's on SQLite."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from db import Database, ProcessClock
from federation.base.database_clock import DatabaseClock
from federation.base.queues.queue import JobQueue
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.outbox.outbox import Outbox
from tests.federation.delivery.entries import any_activity
from tests.federation.delivery.node import PATH, PAYLOAD, URL, Node
from workers.clock import ManualClock

AHEAD = timedelta(days=7)
CLOSE = timedelta(seconds=30)
"""What a slow machine may take between two looks at the time."""


@pytest.fixture
def machine() -> ManualClock:
    """A clock that is a week ahead."""
    return ManualClock(datetime.now(UTC) + AHEAD)


async def test_the_time_is_the_databases_where_it_has_a_clock(database: Database, machine: ManualClock) -> None:
    """However wrong the machine's is, and whatever is done to it later."""
    clock = DatabaseClock(database, machine)
    assert clock.is_known is database.is_sqlite
    await clock.known()
    assert clock.is_known
    machine.advance(AHEAD)
    off = clock.now() - datetime.now(UTC)
    assert abs(off - (2 * AHEAD if database.is_sqlite else timedelta(0))) < CLOSE


async def test_both_times_are_written_down(database: Database, machine: ManualClock) -> None:
    """One row for each process, with its latest; those of long ago go."""
    clock = DatabaseClock(database, machine)
    async with database.transaction() as session:
        old = datetime.now(UTC) - timedelta(days=2)
        session.add(ProcessClock(process="old", machine_at=old, database_at=old))
    for _ in range(2):
        machine.advance(timedelta(hours=1))
        await clock.tick()
    async with database.read() as session:
        (row,) = (await session.execute(select(ProcessClock))).scalars().all()
    assert row.machine_at == machine.now()
    assert abs(row.database_at - (machine.now() if database.is_sqlite else datetime.now(UTC))) < CLOSE


async def test_what_is_owed_is_dated_by_the_database(database: Database, machine: ManualClock, node: Node) -> None:
    """By a process that only owes, in the transaction in which it does so."""
    clock = DatabaseClock(database, machine)
    queue: JobQueue = node.queue
    outbox = Outbox(database, DeliveryQueues(queue), check=any_activity, joins=False, clock=clock)
    async with outbox.transaction() as session:
        owed = await outbox.enqueue_delivery(session, "deliver-post", URL + PATH, URL, PAYLOAD)
    made = (await node.rows())[owed].created_at
    assert abs(made - datetime.now(UTC) - (AHEAD if database.is_sqlite else timedelta(0))) < CLOSE


@pytest.fixture
def node(database: Database) -> Node:
    return Node.on(database, ManualClock())
