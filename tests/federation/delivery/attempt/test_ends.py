"""An end and what is written beside it, the attempt or the answer to a follow, are one."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from db import Database, DeliveryState, Follow, Server
from federation.delivery.ledger.ledger import Ledger
from federation.sealed.outbound.follows import FollowAnswer
from tests.federation.delivery.entries import (
    ACCEPTED,
    NOW,
    SERVER,
    add_rows,
    attempts,
    begun,
    counted_commits,
    failed,
    record,
    rows,
    run,
    series_of,
)


@pytest.mark.parametrize("end", ["gone", "ended"])
async def test_an_attempt_and_its_rows_fate_are_one_write(sqlite: Database, end: str) -> None:
    """If the log does not take the attempt, the row is as it was; repeating the entry writes both."""
    ledger = Ledger(sqlite)
    await add_rows(sqlite, "row-1")
    series = await begun(ledger, "row-1")
    await run(
        sqlite,
        "CREATE TRIGGER refuse BEFORE INSERT ON delivery_attempts BEGIN SELECT RAISE(ABORT, 'pulled the plug'); END",
    )

    async def write() -> bool:
        if end == "gone":
            return await ledger.gone("row-1", attempt=record("row-1"))
        return await ledger.ended(failed(series, attempt=record("row-1")))

    with pytest.raises(SQLAlchemyError):
        await write()

    row = (await rows(sqlite))["row-1"]
    assert (row.state, row.sending, await attempts(sqlite)) == (DeliveryState.READY, 1, [])
    await run(sqlite, "DROP TRIGGER refuse")
    assert await write() is True
    assert await attempts(sqlite) == [("row-1", 0, 1, "permanent", "NO_ACK")]
    assert end == "ended" or await rows(sqlite) == {}


async def test_a_row_and_its_attempt_are_one_commit(ledger: Ledger, database: Database) -> None:
    """On either database; the attempt of a job that was superseded is on record too, and changes nothing else.

    On PostgreSQL an arrival is a statement that commits by itself.
    """
    await add_rows(database, "row-1", "row-2", job_id="another")

    with counted_commits() as commits:
        await asyncio.gather(
            ledger.gone("row-1", attempt=record("row-1", code=None)),
            ledger.ended(failed(series_of("row-2"), attempt=record("row-2"))),
        )

    assert len(commits) == (1 if database.is_sqlite else 2)
    assert sorted(await attempts(database)) == [
        ("row-1", 0, 1, "delivered", None),
        ("row-2", 0, 1, "permanent", "NO_ACK"),
    ]
    assert {each: row.state for each, row in (await rows(database)).items()} == {"row-2": DeliveryState.READY}


async def add_follow(database: Database) -> None:
    async with database.transaction() as session:
        known = {"last_seen": NOW, "created_at": NOW, "updated_at": NOW, "is_healthy": True}
        session.add(Server(url=SERVER, public_key="p", encryption_public_key="e", **known))
        await session.flush()
        session.add(Follow(follower_id="user-a", following_id="user-b", created_at=NOW, follower_server_url=SERVER))


async def only_follow(database: Database) -> tuple[bool, bool]:
    async with database.read() as session:
        follow = (await session.execute(select(Follow))).scalar_one()
        return follow.accepted, follow.acknowledged


async def test_a_follow_and_its_row_change_together(sqlite: Database) -> None:
    """A break between the two leaves both as they were; repeating the entry then does both."""
    ledger = Ledger(sqlite)
    await add_follow(sqlite)
    await add_rows(sqlite, "row-1")
    await run(
        sqlite,
        "CREATE TRIGGER refuse BEFORE UPDATE ON follows BEGIN SELECT RAISE(ABORT, 'pulled the plug'); END",
    )

    with pytest.raises(SQLAlchemyError):
        await ledger.gone("row-1", effect=ACCEPTED)

    assert "row-1" in await rows(sqlite)
    assert await only_follow(sqlite) == (False, False)
    await run(sqlite, "DROP TRIGGER refuse")
    assert await ledger.gone("row-1", effect=ACCEPTED) is True
    assert await rows(sqlite) == {}
    assert await only_follow(sqlite) == (True, False)


async def test_each_caller_learns_of_its_own_follow(ledger: Ledger, database: Database) -> None:
    """In one group, the answer to a follow we do not have is told apart from the one we have."""
    await add_follow(database)
    await add_rows(database, "row-1", "row-2", "row-3")
    stranger = FollowAnswer(follower_id="user-a", following_id="nobody", server_url=SERVER, accepted=True)
    elsewhere = FollowAnswer(
        follower_id="user-a", following_id="user-b", server_url="https://evil.example", accepted=True
    )

    known = await asyncio.gather(
        ledger.gone("row-1", effect=stranger),
        ledger.gone("row-2", effect=ACCEPTED),
        ledger.gone("row-3", effect=elsewhere),
    )

    assert list(known) == [False, True, False]
    assert await rows(database) == {}
    assert await only_follow(database) == (True, False)


async def test_an_acknowledgment_leaves_acceptance_alone(ledger: Ledger, database: Database) -> None:
    """A late "received" after an acceptance does not take it back."""
    await add_follow(database)
    received = FollowAnswer(follower_id="user-a", following_id="user-b", server_url=SERVER, accepted=False)

    await ledger.gone("row-1", effect=ACCEPTED)
    await ledger.gone("row-1", effect=received)

    assert await only_follow(database) == (True, True)
