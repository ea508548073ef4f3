"""The ledger: writes share transactions, and no entry answers for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, Engine, event, select, text
from sqlalchemy.exc import DataError, IntegrityError, OperationalError, SQLAlchemyError

from db import Database, DeliveryJob, Follow
from federation.app import Federation
from federation.delivery.ledger import MAX_ERROR_CHARACTERS, MAX_GROUP, FollowAnswer, Ledger

SERVER = "https://b.example"
ACCEPTED = FollowAnswer(follower_id="user-a", following_id="user-b", server_url=SERVER, accepted=True)


@pytest.fixture
async def database(federation: Federation) -> Database:
    return federation.database


@pytest.fixture
async def ledger(database: Database) -> Ledger:
    return Ledger(database)


async def add_rows(database: Database, *ids: str) -> None:
    async with database.transaction() as session:
        session.add_all(
            DeliveryJob(id=each, target_url=SERVER, payload="{}", created_at=datetime.now(UTC)) for each in ids
        )


async def rows(database: Database) -> dict[str, DeliveryJob]:
    async with database.read() as session:
        return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}


async def run(database: Database, statement: str) -> None:
    async with database.transaction() as session:
        await session.execute(text(statement))


@contextmanager
def counted_commits() -> Iterator[list[object]]:
    """Every transaction committed meanwhile, on any engine."""
    seen: list[object] = []

    def note(connection: Connection) -> None:
        seen.append(connection)

    event.listen(Engine, "commit", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "commit", note)


async def test_concurrent_writes_share_a_transaction(ledger: Ledger, database: Database) -> None:
    """What is handed in during one turn of the loop is one commit, whatever it says."""
    ids = [f"row-{n}" for n in range(90)]
    await add_rows(database, *ids)

    with counted_commits() as commits:
        await asyncio.gather(
            *(ledger.attempted(each) for each in ids[:30]),
            *(ledger.gone(each) for each in ids[30:60]),
            *(ledger.settled(each, outcome="permanent", error="no", code="NO_ACK") for each in ids[60:]),
        )

    assert len(commits) == 1
    left = await rows(database)
    assert left.keys() == set(ids[:30]) | set(ids[60:])
    assert all(left[each].attempts == 1 and left[each].last_attempted_at for each in ids[:30])
    assert all(left[each].outcome == "permanent" and left[each].settled_at for each in ids[60:])


async def test_what_arrives_during_a_commit_makes_the_next_group(ledger: Ledger, database: Database) -> None:
    """A writer at work does not keep others waiting longer than its one transaction."""
    await add_rows(database, *(f"row-{n}" for n in range(21)))

    with counted_commits() as commits:
        first = asyncio.create_task(ledger.attempted("row-0"))
        while not commits:
            await asyncio.sleep(0)
            if first.done():
                break
        await asyncio.gather(first, *(ledger.attempted(f"row-{n}") for n in range(1, 21)))

    assert len(commits) == 2
    assert [row.attempts for row in (await rows(database)).values()] == [1] * 21


async def test_under_load_a_group_is_waited_for(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a group of several, what comes a few turns of the loop later shares the next transaction."""
    monkeypatch.setattr("federation.delivery.ledger.LINGER_SECONDS", 0.5)
    await add_rows(database, *(f"row-{n}" for n in range(4)))
    await asyncio.gather(ledger.gone("row-0"), ledger.gone("row-1"))

    with counted_commits() as commits:
        first = asyncio.create_task(ledger.gone("row-2"))
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.gather(first, ledger.gone("row-3"))

    assert len(commits) == 1
    assert await rows(database) == {}


async def test_attempts_at_one_row_all_count(ledger: Ledger, database: Database) -> None:
    """Two workers that believe in the same job, in one group, are two attempts."""
    await add_rows(database, "row-1", "row-2")

    await asyncio.gather(*(ledger.attempted(each) for each in ("row-1", "row-1", "row-2", "row-1")))

    assert {each: row.attempts for each, row in (await rows(database)).items()} == {"row-1": 3, "row-2": 1}


async def test_a_group_is_bounded(ledger: Ledger, database: Database) -> None:
    """More than one group's worth takes more transactions, in order, and nothing is left over."""
    ids = [f"row-{n}" for n in range(MAX_GROUP + 1)]
    await add_rows(database, *ids)

    with counted_commits() as commits:
        await asyncio.gather(*(ledger.gone(each) for each in ids))

    assert len(commits) == 2
    assert await rows(database) == {}


async def test_a_refused_entry_does_not_fail_its_neighbours(ledger: Ledger, database: Database) -> None:
    """Each of the others is committed; only the refused one's caller hears of it."""
    await add_rows(database, "good-1", "bad", "good-2")
    await run(
        database,
        "CREATE TRIGGER refuse BEFORE UPDATE ON delivery_jobs WHEN NEW.id = 'bad' "
        "BEGIN SELECT RAISE(FAIL, 'not this one'); END",
    )

    outcomes = await asyncio.gather(
        ledger.attempted("good-1"), ledger.attempted("bad"), ledger.attempted("good-2"), return_exceptions=True
    )

    assert outcomes[0] is outcomes[2] is None
    assert isinstance(outcomes[1], IntegrityError)
    assert {each: row.attempts for each, row in (await rows(database)).items()} == {"good-1": 1, "bad": 0, "good-2": 1}


async def test_an_id_without_a_utf8_form_does_not_fail_its_neighbours(ledger: Ledger, database: Database) -> None:
    """What the driver cannot even encode is one caller's affair, too."""
    await add_rows(database, "good")

    outcomes = await asyncio.gather(ledger.gone("row-\ud800"), ledger.gone("good"), return_exceptions=True)

    assert isinstance(outcomes[0], UnicodeError)
    assert outcomes[1] is True
    assert await rows(database) == {}


@pytest.fixture
async def postgres(migrated_postgres_url: str) -> AsyncIterator[Database]:
    database = Database(migrated_postgres_url)
    yield database
    await database.close()


async def test_a_nul_in_an_id_does_not_fail_its_neighbours_on_postgresql(postgres: Database) -> None:
    """PostgreSQL stores no NUL: that entry fails, the others are committed."""
    ledger = Ledger(postgres)
    await add_rows(postgres, "good-1", "good-2")

    outcomes = await asyncio.gather(
        ledger.gone("good-1"), ledger.gone("row\x00"), ledger.attempted("good-2"), return_exceptions=True
    )

    assert outcomes[0] is True
    assert isinstance(outcomes[1], DataError)
    assert outcomes[2] is None
    assert {each: row.attempts for each, row in (await rows(postgres)).items()} == {"good-2": 1}


async def test_a_database_error_reaches_every_caller(ledger: Ledger, database: Database) -> None:
    """Nobody waits for ever or believes in a commit that was none, and the ledger works again afterwards."""
    await add_rows(database, "row-1", "row-2")
    await run(database, "ALTER TABLE delivery_jobs RENAME TO hidden")

    outcomes = await asyncio.gather(
        ledger.attempted("row-1"), ledger.gone("row-2"), ledger.attempted("row-3"), return_exceptions=True
    )

    assert [type(each) for each in outcomes] == [OperationalError] * 3
    await run(database, "ALTER TABLE hidden RENAME TO delivery_jobs")
    await ledger.gone("row-2")
    assert {each: row.attempts for each, row in (await rows(database)).items()} == {"row-1": 0}


async def test_repeats_change_nothing(ledger: Ledger, database: Database) -> None:
    """A row that is gone, or never was, takes every entry again."""
    await add_rows(database, "row-1", "row-2")

    for _ in range(2):
        assert await ledger.gone("row-1") is True
        await ledger.settled("row-2", outcome="permanent", error="the same", code="NO_ACK")
    await ledger.attempted("row-1")
    await ledger.settled("never-was", outcome="permanent", error="no", code="NO_ACK")

    (left,) = (await rows(database)).values()
    assert (left.id, left.last_error, left.error_code) == ("row-2", "the same", "NO_ACK")


async def test_an_error_text_fits_and_holds_no_nul(ledger: Ledger, database: Database) -> None:
    """What a row says of its failure is bounded, and storable on every database."""
    await add_rows(database, "row-1")

    await ledger.settled("row-1", outcome="permanent", error="\x00" + "x" * 100_000, code="NO_ACK")

    assert (await rows(database))["row-1"].last_error == "x" * MAX_ERROR_CHARACTERS


async def test_a_caller_that_gives_up_takes_nobody_with_it(ledger: Ledger, database: Database) -> None:
    """A cancelled attempt's entry may be written or not; its neighbours' are."""
    await add_rows(database, "row-1", "row-2")
    tasks = [asyncio.create_task(ledger.gone(f"row-{n}")) for n in (1, 2)]
    await asyncio.sleep(0)

    tasks[0].cancel()

    assert await tasks[1] is True
    assert "row-2" not in await rows(database)
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert await ledger.gone("row-1") is True


async def add_follow(federation: Federation) -> None:
    await federation.registry.register(url=SERVER, public_key="p", encryption_public_key="e")
    async with federation.database.transaction() as session:
        session.add(
            Follow(
                follower_id="user-a", following_id="user-b", created_at=datetime.now(UTC), follower_server_url=SERVER
            )
        )


async def only_follow(database: Database) -> tuple[bool, bool]:
    async with database.read() as session:
        follow = (await session.execute(select(Follow))).scalar_one()
        return follow.accepted, follow.acknowledged


async def test_a_follow_and_its_row_change_together(federation: Federation, ledger: Ledger, database: Database) -> None:
    """A break between the two leaves both as they were; repeating the entry then does both."""
    await add_follow(federation)
    await add_rows(database, "row-1")
    await run(
        database,
        "CREATE TRIGGER refuse BEFORE UPDATE ON follows BEGIN SELECT RAISE(ABORT, 'pulled the plug'); END",
    )

    with pytest.raises(SQLAlchemyError):
        await ledger.gone("row-1", follow=ACCEPTED)

    assert "row-1" in await rows(database)
    assert await only_follow(database) == (False, False)
    await run(database, "DROP TRIGGER refuse")
    assert await ledger.gone("row-1", follow=ACCEPTED) is True
    assert await rows(database) == {}
    assert await only_follow(database) == (True, False)


async def test_each_caller_learns_of_its_own_follow(federation: Federation, ledger: Ledger, database: Database) -> None:
    """In one group, the answer to a follow we do not have is told apart from the one we have."""
    await add_follow(federation)
    await add_rows(database, "row-1", "row-2", "row-3")
    stranger = FollowAnswer(follower_id="user-a", following_id="nobody", server_url=SERVER, accepted=True)
    elsewhere = FollowAnswer(
        follower_id="user-a", following_id="user-b", server_url="https://evil.example", accepted=True
    )

    known = await asyncio.gather(
        ledger.gone("row-1", follow=stranger),
        ledger.gone("row-2", follow=ACCEPTED),
        ledger.gone("row-3", follow=elsewhere),
    )

    assert list(known) == [False, True, False]
    assert await rows(database) == {}
    assert await only_follow(database) == (True, False)


async def test_an_acknowledgment_leaves_acceptance_alone(
    federation: Federation, ledger: Ledger, database: Database
) -> None:
    """A late "received" after an acceptance does not take it back."""
    await add_follow(federation)
    received = FollowAnswer(follower_id="user-a", following_id="user-b", server_url=SERVER, accepted=False)

    await ledger.gone("row-1", follow=ACCEPTED)
    await ledger.gone("row-1", follow=received)

    assert await only_follow(database) == (True, True)
