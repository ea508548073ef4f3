"""Who waits for the row of an inbox on PostgreSQL, where many write at once, and who does not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import Engine

from db import ActivityInbox, Database
from db.engines import migration_engine
from db.url import parse_url
from federation.activitypub.inboxes import Inboxes, InboxForgotten, gone_among
from workers.clock import ManualClock

T = TypeVar("T")
SERVER = "https://b.example"
INBOX, OTHER = f"{SERVER}/inbox", "https://c.example/inbox"
FORGOTTEN = InboxForgotten(INBOX)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def database(migrated_postgres_url: str) -> AsyncIterator[Database]:
    opened = Database(migrated_postgres_url)
    yield opened
    await opened.close()


@pytest.fixture
async def inboxes(database: Database, clock: ManualClock) -> AsyncIterator[Inboxes]:
    opened = Inboxes(database, clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
def somebody(migrated_postgres_url: str) -> Iterator[Engine]:
    """Somebody else on the same database."""
    engine = migration_engine(parse_url(migrated_postgres_url))
    yield engine
    engine.dispose()


async def without_waiting(database: Database, work: Callable[[Connection], T]) -> T:
    """Do it, or fail if it waits for a lock."""

    def done(connection: Connection) -> T:
        connection.execute(text("SET LOCAL lock_timeout = '1s'"))
        return work(connection)

    return await database.transact(done)


@contextmanager
def written(somebody: Engine, url: str) -> Iterator[None]:
    """Somebody writes the inbox's row, and does not commit yet."""
    with somebody.connect() as connection, connection.begin():
        held = connection.execute(text("UPDATE activitypub_inboxes SET url = url WHERE url = :url"), {"url": url})
        assert held.rowcount == 1
        yield


async def row_of(database: Database, url: str) -> ActivityInbox | None:
    async with database.read() as session:
        return await session.get(ActivityInbox, url)


async def test_the_ledger_leaves_a_row_that_somebody_writes(
    inboxes: Inboxes, database: Database, somebody: Engine
) -> None:
    """Who writes it may want the deliveries that the ledger holds; the inbox's next activity forgets it."""
    await inboxes.missing(INBOX, SERVER, delivery_id="d")
    with written(somebody, INBOX):
        assert await without_waiting(database, lambda each: InboxForgotten.apply(each, [FORGOTTEN])) == [False]
    assert await row_of(database, INBOX) is not None
    assert await without_waiting(database, lambda each: InboxForgotten.apply(each, [FORGOTTEN])) == [True]
    assert await row_of(database, INBOX) is None


async def test_send_leaves_rows_that_somebody_writes(
    inboxes: Inboxes, database: Database, clock: ManualClock, somebody: Engine
) -> None:
    """Two that send to the same inboxes in another order would wait for each other: what it notes are hints."""
    for url in (INBOX, OTHER):
        await inboxes.missing(url, SERVER, delivery_id="d")

    def sent(connection: Connection) -> set[str]:
        return gone_among(connection, [INBOX, OTHER], clock.now(), shared=[INBOX, OTHER])

    with written(somebody, INBOX):
        assert await without_waiting(database, sent) == set()
    rows = [await row_of(database, url) for url in (INBOX, OTHER)]
    assert [row is not None and row.is_shared for row in rows] == [False, True]
    await without_waiting(database, sent)
    row = await row_of(database, INBOX)
    assert row is not None
    assert row.is_shared


async def test_a_gone_inbox_is_tried_by_one_of_those_who_send_at_once(
    inboxes: Inboxes, database: Database, clock: ManualClock, somebody: Engine
) -> None:
    await inboxes.gone(INBOX, SERVER, delivery_id="d")
    clock.advance(timedelta(days=2))

    def sent(connection: Connection) -> set[str]:
        return gone_among(connection, [INBOX], clock.now(), shared=[INBOX])

    with written(somebody, INBOX):
        assert await without_waiting(database, sent) == {INBOX}
    assert await without_waiting(database, sent) == set()


async def test_a_404_is_noted_while_an_activity_is_taken(
    inboxes: Inboxes, database: Database, clock: ManualClock, somebody: Engine
) -> None:
    """The row cannot go between the statement that finds it there and the next one."""
    began = clock.now()
    await inboxes.missing(INBOX, SERVER, delivery_id="d")
    clock.advance(timedelta(days=1))
    taken: list[bool] = []

    def take(_connection: Connection, _cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO activitypub_inboxes"):
            with somebody.begin() as other:
                taken.extend(InboxForgotten.apply(other, [FORGOTTEN]))

    event.listen(Engine, "after_cursor_execute", take)
    try:
        await inboxes.missing(INBOX, SERVER, delivery_id="d")
    finally:
        event.remove(Engine, "after_cursor_execute", take)
    row = await row_of(database, INBOX)
    assert row is not None
    assert (taken, row.missing_since, row.missing_last) == ([False], began, clock.now())
