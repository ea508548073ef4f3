"""The calls of applications: over the process's node, in their own transaction, with `await` and without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import federation
import federation.sync
from db import ActivityActor, ActivityFollow, ActivityInbox, ActivityKey, DeliveryPayload, FollowDirection
from federation import activitypub
from federation.activitypub.activities import JOB
from federation.base.errors import ConfigurationError
from federation.runtime.nodes import get_federation
from tests.federation.activitypub.sender import ALICE, NOW, follower, key_of, note
from tests.federation.sync.conftest import Way, owed
from tests.patience import until
from workers import JobState

EVERYBODY = (follower(), follower("carol", host="c.example"))
PLAIN = pytest.mark.parametrize("place", ["sqlite", "bullmq-postgres"], indirect=True)


class Interrupted(Exception):
    """What a test raises in a transaction."""


@pytest.fixture
def sends(node: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The node sends activities."""
    monkeypatch.setenv("FEDERATION_ACTIVITYPUB", "1")


async def queued() -> set[str]:
    """Ids of the jobs by which activities are sent."""
    queue = get_federation().delivery_queues.of(JOB)
    await queue.start()
    return {job.id for job in (await queue.storage.list(JobState.QUEUED)).jobs}


async def have_jobs(ids: set[str]) -> None:
    async def has_jobs() -> bool:
        return await queued() == ids

    await until(has_jobs)


async def test_an_activity_is_owed_in_the_callers_transaction(sends: None, engine: Engine) -> None:
    """Its actor is made there, too; what is rolled back leaves nothing."""
    with suppress(Interrupted):
        async with federation.transaction() as session:
            await activitypub.add_actor(session, ALICE)
            await activitypub.send(session, note(), EVERYBODY)
            raise Interrupted
    assert left(engine) == (0, 0, 0)
    async with federation.transaction() as session:
        actor = await activitypub.add_actor(session, ALICE)
        sent = await activitypub.send(session, note(), to=EVERYBODY, exclude=["https://c.example"])
    assert (actor.id, len(sent.delivery_ids), len(sent.skipped)) == (ALICE, 1, 1)
    assert owed(engine) == {*sent.delivery_ids}
    await have_jobs({*sent.delivery_ids})


def left(of: Engine) -> tuple[int, ...]:
    """How many actors, keys and texts there are."""
    with Session(of) as session:
        tables = (ActivityActor, ActivityKey, DeliveryPayload)
        return tuple(session.execute(select(func.count()).select_from(table)).scalar_one() for table in tables)


async def test_plain_code_owes_the_same(sends: None, way: Way, engine: Engine) -> None:
    """Through whatever it writes; what is rolled back never was."""
    sync = federation.sync.activitypub

    def plain() -> set[str]:
        with suppress(Interrupted), way.transaction() as caller:
            sync.add_actor(caller, ALICE)
            sync.send(caller, note(), EVERYBODY)
            raise Interrupted
        assert left(engine) == (0, 0, 0)
        with way.transaction() as caller:
            assert sync.add_actor(caller, ALICE).id == ALICE
            sent = sync.send(caller, note(), EVERYBODY)
            assert owed(engine) == set()
        assert owed(engine) == {*sent.delivery_ids}
        return owed(engine)

    ids = await asyncio.to_thread(plain)
    assert len(ids) == 2
    await have_jobs(ids)


@PLAIN
async def test_the_blacklist_is_asked(sends: None, engine: Engine) -> None:
    """By both."""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO blacklisted_servers (id, server_url, created_at, reason)"
            " VALUES ('x', '*.c.example', '2025-01-01 00:00:00', 'spam')"
        )
    async with federation.transaction() as session:
        session.add(key_of(ALICE))
        await session.flush()
        sent = await activitypub.send(session, note(), EVERYBODY)
    assert [(each.recipient, each.reason) for each in sent.skipped] == [(EVERYBODY[1], "blacklisted")]

    def plain() -> activitypub.Sent:
        with federation.sync.transaction() as session:
            return federation.sync.activitypub.send(session, note(2), EVERYBODY)

    assert (await asyncio.to_thread(plain)).skipped == sent.skipped


@PLAIN
async def test_an_actor_is_removed_and_gone_inboxes_are_told(sends: None, engine: Engine) -> None:
    """By both; of an actor the key stays for the news."""
    gone = [
        ActivityInbox(url=f"https://b.example/{days}", server_url="https://b.example", gone_code=410) for days in (1, 2)
    ]
    for days, inbox in enumerate(gone, 1):
        inbox.gone_at = NOW + timedelta(days=days)
    async with federation.transaction() as session:
        session.add_all(gone)
        await activitypub.add_actor(session, ALICE)
        await activitypub.remove_actor(session, ALICE)
        told = await activitypub.gone(session, NOW + timedelta(days=1, hours=1))
        assert (await activitypub.send(session, note(), EVERYBODY)).delivery_ids
    assert [(each.url, each.code) for each in told] == [("https://b.example/2", 410)]
    assert removed(engine) == {ALICE: True}

    def plain() -> list[activitypub.GoneInbox]:
        with federation.sync.transaction() as session:
            federation.sync.activitypub.add_actor(session, ALICE)
        assert removed(engine) == {ALICE: False}
        with federation.sync.transaction() as session:
            federation.sync.activitypub.remove_actor(session, ALICE)
            return federation.sync.activitypub.gone(session, NOW + timedelta(days=1, hours=1))

    assert await asyncio.to_thread(plain) == told
    assert removed(engine) == {ALICE: True}


@PLAIN
async def test_follows_are_kept_and_used(sends: None, engine: Engine) -> None:
    """By both: whom ours follow, who may follow them, and what is sent to those."""
    bob = EVERYBODY[0]
    async with federation.transaction() as session:
        await activitypub.add_actor(session, ALICE)
        session.add(follower(bob))
    async with federation.transaction() as session:
        assert not (await activitypub.send(session, note(1), activitypub.FOLLOWERS)).delivery_ids
        assert await activitypub.answer_follow(session, ALICE, bob.id, "pending") is None
        assert await activitypub.answer_follow(session, ALICE, bob.id, "accept")
        assert len((await activitypub.send(session, note(2), activitypub.FOLLOWERS)).delivery_ids) == 1
        assert await activitypub.unfollow_actor(session, ALICE, bob.id) is None
        assert (await activitypub.follow_actor(session, ALICE, bob)).delivery_ids
        assert await activitypub.unfollow_actor(session, ALICE, bob.id)

    def plain() -> int:
        sync = federation.sync.activitypub
        with federation.sync.transaction() as session:
            assert sync.follow_actor(session, ALICE, bob).delivery_ids
            assert sync.unfollow_actor(session, ALICE, bob.id)
            assert sync.unfollow_actor(session, ALICE, bob.id) is None
            assert len(sync.send(session, note(3), activitypub.FOLLOWERS).delivery_ids) == 1
            assert sync.answer_follow(session, ALICE, bob.id, "reject")
            return len(sync.send(session, note(4), activitypub.FOLLOWERS).delivery_ids)

    assert await asyncio.to_thread(plain) == 0


def follower(recipient: activitypub.Recipient) -> ActivityFollow:
    """Somebody who wants to follow Alice."""
    return ActivityFollow(
        local_actor=ALICE,
        remote_actor=recipient.id,
        direction=FollowDirection.FOLLOWER,
        inbox=recipient.inbox,
        shared_inbox=recipient.shared_inbox,
        follow_id=f"{recipient.id}/follows/1",
        since=NOW,
    )


def removed(of: Engine) -> dict[str, bool]:
    with Session(of) as session:
        return {each.id: each.removed_at is not None for each in session.execute(select(ActivityActor)).scalars()}


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("send", (note(), EVERYBODY)),
    ("add_actor", (ALICE,)),
    ("remove_actor", (ALICE,)),
    ("gone", (NOW,)),
    ("follow_actor", (ALICE, EVERYBODY[0])),
    ("unfollow_actor", (ALICE, EVERYBODY[0].id)),
    ("answer_follow", (ALICE, EVERYBODY[0].id, "accept")),
]


@pytest.mark.parametrize(("call", "arguments"), CALLS)
@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_the_wrong_kind_of_session_names_the_right_call(
    sends: None,
    engine: Engine,
    call: str,
    arguments: tuple[Any, ...],
) -> None:
    """Of each other."""
    asked: Callable[..., Any] = getattr(activitypub, call)
    with Session(engine) as session, pytest.raises(TypeError, match=rf"federation\.sync\.activitypub\.{call}$"):
        await asked(session, *arguments)
    plain: Callable[..., Any] = getattr(federation.sync.activitypub, call)
    async with AsyncSession() as session:
        with pytest.raises(TypeError, match=rf"`await federation\.activitypub\.{call}`"):
            await asyncio.to_thread(plain, session, *arguments)


@pytest.mark.parametrize(("call", "arguments"), CALLS)
@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_without_the_wire_the_calls_name_the_setting(
    node: dict[str, str],
    call: str,
    arguments: tuple[Any, ...],
) -> None:
    """Which is off by default."""
    async with AsyncSession() as session:
        with pytest.raises(ConfigurationError, match="FEDERATION_ACTIVITYPUB=1"):
            await getattr(activitypub, call)(session, *arguments)
        with pytest.raises(ConfigurationError, match="FEDERATION_ACTIVITYPUB=1"):
            await asyncio.to_thread(getattr(federation.sync.activitypub, call), session, *arguments)


def test_every_public_name_is_there() -> None:
    """And no other."""
    for name in activitypub.__all__:
        assert getattr(activitypub, name) is not None
    assert {*activitypub.__all__} <= {*dir(activitypub)}
    with pytest.raises(AttributeError, match="no attribute 'sealed'"):
        _ = activitypub.sealed
