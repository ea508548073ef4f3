"""The ledger: writes share transactions, and no entry answers for another."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.exc import DataError, IntegrityError, OperationalError

from db import Database
from federation.delivery.ledger.entries import Begun, NotBegun
from federation.delivery.ledger.ledger import CROWD, MAX_ERROR_CHARACTERS, MAX_GROUP, Ledger
from tests.federation.delivery.entries import (
    LATER,
    NOW,
    add_rows,
    attempts,
    beginning,
    begun,
    counted_commits,
    failed,
    record,
    rows,
    run,
    series_of,
)


async def test_concurrent_writes_share_a_transaction(ledger: Ledger, database: Database) -> None:
    """What is handed in during one turn of the loop is one commit, whatever it says.

    On PostgreSQL beginnings and arrivals are a statement that commits by itself.
    """
    ids = [f"row-{n}" for n in range(90)]
    await add_rows(database, *ids)
    ending = [await begun(ledger, each) for each in ids[60:]]

    with counted_commits() as commits:
        await asyncio.gather(
            *(ledger.begin(beginning(each)) for each in ids[:30]),
            *(ledger.gone(each) for each in ids[30:60]),
            *(ledger.ended(failed(series)) for series in ending),
        )

    assert len(commits) == (1 if database.is_sqlite else 2)
    left = await rows(database)
    assert left.keys() == set(ids[:30]) | set(ids[60:])
    assert all((left[each].attempts, left[each].last_attempted_at) == (1, NOW) for each in ids[:30])
    assert all((left[each].outcome, left[each].settled_at) == ("permanent", LATER) for each in ids[60:])


async def test_what_arrives_during_a_commit_makes_the_next_group(ledger: Ledger, database: Database) -> None:
    """A writer at work does not keep others waiting longer than its one transaction."""
    await add_rows(database, *(f"row-{n}" for n in range(21)))

    with counted_commits() as commits:
        first = asyncio.create_task(begun(ledger, "row-0"))
        while not commits:
            await asyncio.sleep(0)
            if first.done():
                break
        await asyncio.gather(first, *(begun(ledger, f"row-{n}") for n in range(1, 21)))

    assert len(commits) == 2
    assert [row.attempts for row in (await rows(database)).values()] == [1] * 21


async def test_under_load_a_group_is_waited_for(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a large group, what comes a few turns of the loop later shares the next transaction."""
    monkeypatch.setattr("federation.delivery.ledger.ledger.LINGER_SECONDS", 0.5)
    await add_rows(database, *(f"row-{n}" for n in range(CROWD + 3)))
    await asyncio.gather(*(ledger.gone(f"row-{n}") for n in range(CROWD + 1)))

    with counted_commits() as commits:
        first = asyncio.create_task(ledger.gone(f"row-{CROWD + 1}"))
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.gather(first, ledger.gone(f"row-{CROWD + 2}"))

    assert len(commits) == 1
    assert await rows(database) == {}


async def test_a_group_is_bounded(ledger: Ledger, database: Database) -> None:
    """More than one group's worth takes more transactions, in order, and nothing is left over."""
    ids = [f"row-{n}" for n in range(MAX_GROUP + 1)]
    await add_rows(database, *ids)

    with counted_commits() as commits:
        await asyncio.gather(*(ledger.gone(each) for each in ids))

    assert len(commits) == 2
    assert await rows(database) == {}


async def test_a_refused_entry_does_not_fail_its_neighbours(sqlite: Database) -> None:
    """Each of the others is committed; only the refused one's caller hears of it."""
    ledger = Ledger(sqlite)
    await add_rows(sqlite, "good-1", "bad", "good-2")
    await run(
        sqlite,
        "CREATE TRIGGER refuse BEFORE UPDATE ON delivery_jobs WHEN NEW.id = 'bad' "
        "BEGIN SELECT RAISE(FAIL, 'not this one'); END",
    )

    outcomes = await asyncio.gather(
        *(ledger.begin(beginning(each)) for each in ("good-1", "bad", "good-2")), return_exceptions=True
    )

    assert isinstance(outcomes[0], Begun)
    assert isinstance(outcomes[1], IntegrityError)
    assert isinstance(outcomes[2], Begun)
    assert {each: row.attempts for each, row in (await rows(sqlite)).items()} == {"good-1": 1, "bad": 0, "good-2": 1}


async def test_an_id_without_a_utf8_form_does_not_fail_its_neighbours(ledger: Ledger, database: Database) -> None:
    """What the driver cannot even encode is one caller's affair, too."""
    await add_rows(database, "good")

    outcomes = await asyncio.gather(ledger.gone("row-\ud800"), ledger.gone("good"), return_exceptions=True)

    assert isinstance(outcomes[0], UnicodeError)
    assert outcomes[1] is True
    assert await rows(database) == {}


async def test_a_nul_in_an_id_does_not_fail_its_neighbours_on_postgresql(migrated_postgres_url: str) -> None:
    """PostgreSQL stores no NUL: that entry fails, the others are committed."""
    database = Database(migrated_postgres_url)
    ledger = Ledger(database)
    await add_rows(database, "good-1", "good-2")

    outcomes = await asyncio.gather(
        ledger.gone("good-1"), ledger.gone("row\x00"), ledger.begin(beginning("good-2")), return_exceptions=True
    )

    assert outcomes[0] is True
    assert isinstance(outcomes[1], DataError)
    assert isinstance(outcomes[2], Begun)
    assert {each: row.attempts for each, row in (await rows(database)).items()} == {"good-2": 1}
    await database.close()


async def test_a_database_error_reaches_every_caller(sqlite: Database) -> None:
    """Nobody waits for ever or believes in a commit that was none, and the ledger works again afterwards."""
    ledger = Ledger(sqlite)
    await add_rows(sqlite, "row-1", "row-2")
    await run(sqlite, "ALTER TABLE delivery_jobs RENAME TO hidden")

    outcomes = await asyncio.gather(
        ledger.begin(beginning("row-1")),
        ledger.gone("row-2"),
        ledger.ended(failed(series_of("row-3"))),
        return_exceptions=True,
    )

    assert [type(each) for each in outcomes] == [OperationalError] * 3
    await run(sqlite, "ALTER TABLE hidden RENAME TO delivery_jobs")
    await ledger.gone("row-2")
    assert {each: row.attempts for each, row in (await rows(sqlite)).items()} == {"row-1": 0}


async def test_repeats_change_nothing(ledger: Ledger, database: Database) -> None:
    """A row that is gone, or never was, takes every entry again; so does one that is over."""
    await add_rows(database, "row-1", "row-2")
    series = await begun(ledger, "row-2")

    for time in range(2):
        assert await ledger.gone("row-1", attempt=record("row-1", code=None)) is True
        assert await ledger.ended(failed(series, error="the same", attempt=record("row-2"))) is (time == 0)
    assert await ledger.begin(beginning("row-1")) == NotBegun(exists=False)
    assert await ledger.begin(beginning("row-2")) == NotBegun(exists=True)
    assert await ledger.ended(failed(series_of("never-was"))) is False

    (left,) = (await rows(database)).values()
    assert (left.id, left.last_error, left.error_code, left.attempts) == ("row-2", "the same", "NO_ACK", 1)
    assert await attempts(database) == [
        ("row-1", 0, 1, "delivered", None),
        ("row-2", 0, 1, "permanent", "NO_ACK"),
    ]


async def test_an_error_text_fits_and_holds_no_nul(ledger: Ledger, database: Database) -> None:
    """What a row says of its failure is bounded, and storable on every database."""
    await add_rows(database, "row-1")

    await ledger.ended(failed(await begun(ledger, "row-1"), error="\x00" + "x" * 100_000))

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
