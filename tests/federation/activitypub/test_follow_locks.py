"""What is said of a follow at the moment of another Follow counts, on PostgreSQL, where many write at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session
from sqlmodel import col

from db import ActivityFollow, Database, FollowDirection, FollowState
from federation.activitypub import follows
from federation.activitypub.handlers import FollowDecision
from federation.activitypub.outbound import Recipient
from tests.federation.activitypub.sender import ALICE, NOW
from tests.patience import until

T = TypeVar("T")
BOB = "https://b.example/users/bob"
WAITING: Final = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


@pytest.fixture
async def database(migrated_postgres_url: str) -> AsyncIterator[Database]:
    opened = Database(migrated_postgres_url)
    yield opened
    await opened.close()


def row(direction: FollowDirection, state: FollowState = FollowState.PENDING) -> ActivityFollow:
    return ActivityFollow(
        local_actor=ALICE,
        remote_actor=BOB,
        direction=direction,
        inbox=f"{BOB}/inbox",
        follow_id="old",
        state=state,
        since=NOW,
    )


async def meanwhile(database: Database, first: Callable[[Session], object], second: Callable[[Session], T]) -> T:
    """Begin the second while the first is not committed yet; what that returns."""

    async def do() -> T:
        async with database.transaction() as session:
            return await session.run_sync(second)

    async def waits() -> bool:
        async with database.read() as session:
            return bool((await session.execute(WAITING)).scalar_one())

    async with database.transaction() as session:
        await session.run_sync(first)
        await session.flush()
        doing = asyncio.create_task(do())
        await until(waits)
    return await doing


def follow(session: Session) -> None:
    following = {"actor": ALICE, "id": "new"}
    follows.followed(session, following=following, remote=Recipient(id=BOB, inbox=f"{BOB}/inbox"), now=NOW)


async def state_and_follow(database: Database) -> tuple[FollowState, str | None]:
    [found] = await database.rows(select(col(ActivityFollow.state), col(ActivityFollow.follow_id)))
    return found.state, found.follow_id


@pytest.mark.parametrize("is_known", [True, False])
async def test_what_is_accepted_meanwhile_stays_so(database: Database, is_known: bool) -> None:
    """Whether there was a follow before, or another process makes it."""
    if is_known:
        async with database.transaction() as session:
            session.add(row(FollowDirection.FOLLOWING))

    def accept(session: Session) -> None:
        session.merge(row(FollowDirection.FOLLOWING, FollowState.ACCEPTED))

    await meanwhile(database, accept, follow)
    assert await state_and_follow(database) == (FollowState.ACCEPTED, "new")


async def test_an_answer_names_the_follow_that_comes_meanwhile(database: Database) -> None:
    """And not the one before, of which the other may know no more."""
    async with database.transaction() as session:
        session.add(row(FollowDirection.FOLLOWER))

    def ask(session: Session) -> None:
        session.execute(text("UPDATE activitypub_follows SET follow_id = 'new'"))

    def answer(session: Session) -> object:
        owed = follows.answered(session, local=ALICE, remote=BOB, answer=FollowDecision.ACCEPT, now=NOW)
        assert owed is not None
        return owed[0]["object"]["id"]

    assert await meanwhile(database, ask, answer) == "new"
    assert await state_and_follow(database) == (FollowState.ACCEPTED, "new")
