"""Beginnings and arrivals on the fast paths: what `Group` does to the same rows, or nothing.

In one statement of PostgreSQL, in a short one each on SQLite.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import insert
from sqlmodel import SQLModel

from db import (
    AttemptNote,
    Database,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryPayload,
    DeliveryState,
    Follow,
    HoldReason,
    Server,
)
from federation.delivery.ledger.attempt_log import write_attempts
from federation.delivery.ledger.entries import Begun, Entry, Gone, NotBegun
from federation.delivery.ledger.ledger import Ledger
from federation.delivery.ledger.postgres_fast_path import UsualEntry, write_usual
from federation.delivery.ledger.statements import Group
from federation.sealed.outbound.follows import FollowAnswer
from tests.federation.delivery.entries import LATER, NOW, SERVER, add_rows, attempts, beginning, record, rows, run

TABLES: tuple[type[SQLModel], ...] = (DeliveryAttempt, DeliveryJob, DeliveryPayload, Follow, Server)


@pytest.fixture
async def database(migrated_postgres_url: str) -> AsyncIterator[Database]:
    opened = Database(migrated_postgres_url)
    yield opened
    await opened.close()


async def test_it_begins_and_removes_in_one_statement(database: Database) -> None:
    await add_rows(database, "begins", "arrives")

    began, gone = await write_usual(
        database, [beginning("begins"), Gone(delivery_id="arrives", attempt=record("arrives"))]
    )

    assert isinstance(began, Begun)
    assert began.text == "text of begins"
    assert gone is True
    left = await rows(database)
    assert {each: (row.attempts, row.sending) for each, row in left.items()} == {"begins": (1, 1)}
    assert [each[0] for each in await attempts(database)] == ["arrives"]


@pytest.mark.parametrize(
    "values",
    [
        {"job_id": None},
        {"job_name": None},
        {"job_id": "another"},
        {"state": DeliveryState.HELD, "held_reason": HoldReason.SERVER},
        {"settled_at": NOW},
        {"sending": 7},
    ],
    ids=lambda values: next(iter(values)),
)
async def test_a_row_that_is_not_as_usual_begins_nothing(database: Database, values: dict[str, Any]) -> None:
    await add_rows(database, "row-1", **values)
    before = (await rows(database))["row-1"].model_dump()

    assert await write_usual(database, [beginning("row-1")]) == [None]

    assert (await rows(database))["row-1"].model_dump() == before


async def test_of_lines_only_one_with_others_is_left_alone(database: Database) -> None:
    """Most are of one delivery: that of an activity at an inbox. What was given up has to be forgotten, too."""
    over = {"state": DeliveryState.FAILED, "settled_at": NOW}
    await add_rows(database, "alone", ordering_key="a", ordering_position=1)
    await add_rows(database, "elsewhere", ordering_key="a", ordering_position=1, server_url="https://c.example")
    await add_rows(database, "first", ordering_key="b", ordering_position=1)
    await add_rows(database, "second", ordering_key="b", ordering_position=2, state="held", held_reason="order")
    await add_rows(database, "older", ordering_key="c", ordering_position=1, **over)
    await add_rows(database, "younger", ordering_key="c", ordering_position=2)

    gone = [Gone(delivery_id=each, attempt=record(each)) for each in ("alone", "first", "younger")]

    assert await write_usual(database, gone) == [True, None, None]
    assert [each[0] for each in await attempts(database)] == ["alone"]
    assert (await rows(database)).keys() == {"elsewhere", "first", "second", "older", "younger"}


async def test_an_arrival_with_more_to_it_changes_nothing(database: Database) -> None:
    """Neither the row, nor the log, nor the follow: all three belong together."""
    await add_rows(database, "row-1", payload_id="text")
    answer = FollowAnswer(follower_id="user-a", following_id="user-b", server_url=SERVER, accepted=True)

    await add_follow(database)

    assert await write_usual(database, [Gone(delivery_id="row-1", attempt=record("row-1"), effect=answer)]) == [None]

    assert list(await rows(database)) == ["row-1"]
    assert await attempts(database) == []
    assert [row["accepted"] for row in await everything(database, Follow)] == [False]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_note_is_on_record(database: Database, is_late: bool) -> None:
    """Also that of an attempt that had been given up for lost."""
    await add_rows(database, "row-1")
    if is_late:
        await database.transact(lambda connection: write_attempts(connection, [record("row-1", code="STALLED")]))
    forged = replace(record("row-1", code=None), note=AttemptNote.FORGED_ACK)

    assert await write_usual(database, [Gone(delivery_id="row-1", attempt=forged)]) == [True]

    assert [row["note"] for row in await everything(database, DeliveryAttempt)] == [AttemptNote.FORGED_ACK]


@pytest.mark.parametrize(("was", "becomes"), [("STALLED", None), ("TIMEOUT", "TIMEOUT")])
async def test_an_attempt_on_record_stays_unless_it_was_given_up_for_lost(
    database: Database, was: str, becomes: str | None
) -> None:
    await add_rows(database, "row-1")
    await database.transact(lambda connection: write_attempts(connection, [record("row-1", code=was)]))

    assert await write_usual(database, [Gone(delivery_id="row-1", attempt=record("row-1", code=None))]) == [True]

    assert [each[4] for each in await attempts(database)] == [becomes]


async def test_the_second_entry_for_a_delivery_is_left_alone(database: Database) -> None:
    await add_rows(database, "row-1", "row-2")
    entries: list[UsualEntry] = [
        beginning("row-1"),
        beginning("row-1"),
        Gone(delivery_id="row-1"),
        Gone(delivery_id="row-2"),
        Gone(delivery_id="row-2"),
    ]

    first, second, third, fourth, fifth = await write_usual(database, entries)

    assert isinstance(first, Begun)
    assert (second, third, fourth, fifth) == (NotBegun(exists=True), None, True, None)


async def test_a_shared_text_goes_with_its_last_row(database: Database) -> None:
    """A row that shares it unexpectedly is left alone; one that is known to, releases it."""
    async with database.transaction() as session:
        session.add(DeliveryPayload(id="text", payload="{}", refs=3, created_at=NOW))
    await add_rows(database, "row-1", "row-2", "row-3", payload="", payload_id="text")
    await add_rows(database, "own")

    assert await write_usual(database, [Gone(delivery_id="row-1", shared=True), Gone(delivery_id="own")]) == [True] * 2
    assert [row["refs"] for row in await everything(database, DeliveryPayload)] == [2]
    assert await write_usual(database, [Gone(delivery_id=each, shared=True) for each in ("row-2", "row-3")]) == [
        True,
        True,
    ]
    assert await everything(database, DeliveryPayload) == []
    assert await rows(database) == {}


@pytest.mark.parametrize("seed", range(12))
async def test_the_ledger_does_what_a_group_does(database_url: str, seed: int) -> None:
    """Whatever the rows are like: the same results, the same tables."""
    database = Database(database_url)
    entries = some_entries(random.Random(seed))
    await prepare(database, random.Random(seed))
    expected = await database.transact(lambda connection: Group(connection, LATER).write(entries).results)
    after = [await everything(database, table) for table in TABLES]
    await prepare(database, random.Random(seed))

    ledger = Ledger(database)
    results = [await ledger._write(entry) for entry in entries] if seed % 2 else await together(ledger, entries)

    assert results == expected
    assert [await everything(database, table) for table in TABLES] == after
    await ledger.close()
    await database.close()


async def together(ledger: Ledger, entries: list[Entry]) -> list[object]:
    if ledger._database.is_sqlite:
        return await asyncio.gather(*map(ledger._write, entries))
    futures = [ledger._usual.put(entry) for entry in entries if isinstance(entry, UsualEntry)]
    results = [await future for future in futures]
    return [await each if hasattr(each, "__await__") else each for each in results]


ROWS = tuple(f"row-{number}" for number in range(30))


def some_entries(chance: random.Random) -> list[Entry]:
    """Beginnings, then arrivals, as a group writes them; never two for one delivery."""
    chosen = chance.sample((*ROWS, "absent-1", "absent-2"), 24)
    begins: list[Entry] = [beginning(each, attempt=chance.choice((1, 1, 2))) for each in chosen[:12]]
    arrivals: list[Entry] = [
        Gone(
            delivery_id=each,
            attempt=chance.choice((None, record(each), record(each, attempt=2, code=None))),
            effect=chance.choice(
                (
                    None,
                    *(
                        FollowAnswer(
                            follower_id=f"user-{number or 'a'}",
                            following_id="user-b",
                            server_url=SERVER,
                            accepted=accepted,
                        )
                        for number in range(4)
                        for accepted in (True, False)
                    ),
                )
            ),
            shared=chance.random() < 0.5,
        )
        for each in chosen[12:]
    ]
    return begins + arrivals


async def prepare(database: Database, chance: random.Random) -> None:
    """Rows of every kind, texts that some share, follows of three users, and attempts that were given up for lost."""
    for table in TABLES:
        await run(database, f"DELETE FROM {table.__tablename__}")
    texts = {each: chance.choice(("", "", "text-1", "text-2")) for each in ROWS}
    async with database.transaction() as session:
        for name in ("text-1", "text-2"):
            refs = sum(text == name for text in texts.values())
            session.add(DeliveryPayload(id=name, payload="{}", refs=refs, created_at=NOW))
        lost = record(chance.choice(ROWS), code="STALLED")
        await session.execute(insert(DeliveryAttempt).values({name: getattr(lost, name) for name in lost.__slots__}))
    for number in range(3):
        await add_follow(database, number)
    for each, text in texts.items():
        odd: dict[str, Any] = chance.choice(
            (
                *({},) * 6,
                {"job_id": None},
                {"job_id": "another"},
                {"sending": 1, "last_attempted_at": NOW},
                {"sending": 2, "last_attempted_at": NOW},
                {"state": DeliveryState.HELD, "held_reason": HoldReason.OURS},
                {"canary_at": NOW, "released_at": NOW},
                {"canary_at": NOW, "released_at": NOW + timedelta(seconds=1), "first_attempted_at": NOW},
                {"ordering_key": "k", "ordering_position": int(each[4:])},
            )
        )
        shared = {"payload": "", "payload_id": text} if text else {}
        await add_rows(database, each, **{**shared, **odd})


async def add_follow(database: Database, number: int = 0) -> None:
    """A follow of that user of somebody at `SERVER`, which is registered."""
    async with database.transaction() as session:
        if number == 0:
            server: dict[str, Any] = dict.fromkeys(("last_seen", "created_at", "updated_at"), NOW)
            server |= {"public_key": "p", "encryption_public_key": "e", "is_healthy": True, "health_check_attempts": 0}
            session.add(Server(id="s", url=SERVER, **server))
            await session.flush()
        name = f"user-{number}" if number else "user-a"
        session.add(
            Follow(id=name, created_at=NOW, follower_id=name, following_id="user-b", follower_server_url=SERVER)
        )


async def everything(database: Database, table: type[SQLModel]) -> list[dict[str, object]]:
    """All rows of the table but for the numbers that a sequence gave them."""
    columns = table.__table__.c  # type: ignore[attr-defined] # SQLModel adds it at run time
    found = await database.rows(columns.id.table.select())
    return sorted(
        (
            {name: value for name, value in row._mapping.items() if table is not DeliveryAttempt or name != "id"}
            for row in found
        ),
        key=str,
    )
