"""Attempts as they end: each is told once, whatever order transactions commit in; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, delete, insert, text

from db import AttemptOutcome, Database, DeliveryAttempt
from federation.admin import attempt_feed
from federation.admin.attempt_feed import AttemptFeed, AttemptReader, Watcher
from federation.admin.attempts import LoggedAttempt, newest_attempts
from tests.patience import eventually

PEER = "https://peer.example"


def rows(names: Sequence[str]) -> list[dict[str, object]]:
    return [
        {
            "delivery_id": name,
            "job_name": "post",
            "server_url": PEER,
            "series": 0,
            "attempt": 1,
            "started_at": datetime.now(UTC),
            "duration_ms": 7,
            "outcome": AttemptOutcome.DELIVERED,
        }
        for name in names
    ]


async def add(database: Database, *names: str) -> None:
    async with database.transaction() as session:
        await session.execute(insert(DeliveryAttempt), rows(names))


def names_of(attempts: Sequence[LoggedAttempt]) -> list[str]:
    return [attempt.delivery_id for attempt in attempts]


@pytest.fixture
async def reader(database: Database) -> AttemptReader:
    """It has begun, behind one attempt."""
    await add(database, "before")
    started = AttemptReader(database)
    await started.start()
    return started


@pytest.fixture
async def postgres(migrated_postgres_url: str) -> AsyncIterator[Database]:
    """A database in which transactions run side by side."""
    opened = Database(migrated_postgres_url)
    yield opened
    await opened.close()


@pytest.fixture
async def elsewhere(migrated_postgres_url: str) -> AsyncIterator[Database]:
    """The same, in postgres process."""
    opened = Database(migrated_postgres_url)
    yield opened
    await opened.close()


async def test_what_ends_is_read_once_and_in_order(database: Database, reader: AttemptReader) -> None:
    """And not what ended before."""
    await add(database, "a", "b")
    await add(database, "c")
    attempts, more = await reader.read()
    assert (names_of(attempts), more) == (["a", "b", "c"], False)
    assert await reader.read() == ([], False)


async def test_a_look_is_bounded(database: Database, reader: AttemptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest follows at once."""
    await add(database, *(str(number) for number in range(attempt_feed.PAGE + 3)))
    first, more = await reader.read()
    assert (len(first), more) == (attempt_feed.PAGE, True)
    rest, more = await reader.read()
    assert (names_of(rest), more) == ([str(attempt_feed.PAGE + each) for each in range(3)], False)


async def test_transactions_that_commit_out_of_order_lose_nothing(postgres: Database, elsewhere: Database) -> None:
    """A lower number that appears after a higher one is read then, and once."""
    reader = AttemptReader(postgres)
    await reader.start()
    async with elsewhere.transaction() as slow:
        await slow.execute(insert(DeliveryAttempt), rows(["slow 1", "slow 2"]))
        await add(postgres, "quick")
        assert names_of((await reader.read())[0]) == ["quick"]
        assert await reader.read() == ([], False)
        await add(postgres, "quicker")
        assert names_of((await reader.read())[0]) == ["quicker"]
    assert names_of((await reader.read())[0]) == ["slow 1", "slow 2"]
    assert await reader.read() == ([], False)


async def test_numbers_that_never_appear_are_given_up(
    postgres: Database, elsewhere: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the transactions are over that had begun before; those of a transaction that goes on are waited for."""
    monkeypatch.setattr(attempt_feed, "LEAST_WAIT", attempt_feed.LEAST_WAIT * 0)

    def undone(connection: Connection) -> None:
        connection.execute(insert(DeliveryAttempt), rows(["undone"]))
        raise ZeroDivisionError

    reader = AttemptReader(postgres)
    await reader.start()
    async with elsewhere.transaction() as slow:
        await slow.execute(insert(DeliveryAttempt), rows(["slow"]))
        with pytest.raises(ZeroDivisionError):
            await postgres.transact(undone)
        await add(postgres, "quick")
        for _ in range(3):
            await reader.read()
        assert len(reader._skipped) == 2
    assert names_of((await reader.read())[0]) == ["slow"]
    await reader.read()
    assert reader._skipped == {}


async def test_a_hole_of_any_size_is_remembered_in_part(postgres: Database) -> None:
    """As postgres program leaves one that sets the sequence."""
    reader = AttemptReader(postgres)
    await reader.start()
    async with postgres.transaction() as session:
        await session.execute(insert(DeliveryAttempt), [{**rows(["far"])[0], "id": 10**12}])
    assert names_of((await reader.read())[0]) == ["far"]
    assert len(reader._skipped) == attempt_feed.MAX_SKIPPED


async def test_an_emptied_log_begins_with_1_again(database: Database, reader: AttemptReader) -> None:
    """On SQLite, once the purge has removed every row."""
    await add(database, "a", "b")
    await reader.read()
    async with database.transaction() as session:
        await session.execute(delete(DeliveryAttempt))
    assert await reader.read() == ([], False)
    await add(database, "again")
    assert names_of((await reader.read())[0]) == ["again"]


async def test_everybody_who_watches_is_told(database: Database) -> None:
    """By one reader, which ends with the last of them."""
    feed = AttemptFeed(database)
    async with feed.watch() as first, feed.watch() as second:
        await add(database, "a")
        for watcher in (first, second):
            news = await watcher.news()
            assert (names_of(news.attempts), news.missed, news.problem) == (["a"], 0, None)
    assert "attempt-feed" not in {task.get_name() for task in asyncio.all_tasks()}
    async with feed.watch() as again:
        await add(database, "b")
        assert names_of((await again.news()).attempts) == ["b"]


async def test_a_watcher_that_takes_nothing_misses_some_and_is_told_how_many(database: Database) -> None:
    """It waits for no one, and no one for it."""
    many = [str(number) for number in range(attempt_feed.MAX_WAITING + 10)]
    feed = AttemptFeed(database)
    async with feed.watch() as watcher, feed.watch() as attentive:
        await add(database, *many)
        seen: list[str] = []
        while len(seen) < len(many):
            seen += names_of((await attentive.news()).attempts)
        news = await watcher.news()
    assert seen == many
    assert (names_of(news.attempts), news.missed) == (many[10:], 10)


async def test_a_database_that_is_away_is_told_of(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and once it is back."""
    feed = AttemptFeed(database)
    async with feed.watch() as watcher:
        await database.transact(rename("delivery_attempts", "away"))
        assert (await watcher.news()).problem is not None
        await database.transact(rename("away", "delivery_attempts"))
        back = await eventually(watcher.news, lambda news: news.problem is None)
    assert back.attempts == ()


async def test_the_newest_attempts_are_read_oldest_first(database: Database) -> None:
    await add(database, "a", "b", "c")
    assert names_of(await newest_attempts(database, 2)) == ["b", "c"]
    assert await newest_attempts(database, 0) == []


def test_a_watcher_waits_for_something_new() -> None:
    """An outage that goes on is nothing new."""
    watcher = Watcher()
    watcher.tell([], None)
    watcher.tell([], "OperationalError")
    assert asyncio.run(watcher.news()).problem == "OperationalError"
    watcher.tell([], "OperationalError")
    assert not watcher._told.is_set()


def rename(old: str, new: str) -> Callable[[Connection], object]:
    return lambda connection: connection.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))
