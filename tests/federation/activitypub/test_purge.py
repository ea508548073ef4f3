"""What is purged of ActivityPub's tables, and what stays; on SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from db import (
    ActivityActor,
    ActivityFollow,
    ActivityInbox,
    ActivityKey,
    Database,
    FollowDirection,
    FollowState,
    ReceivedActivity,
    ReceivedState,
    RemoteActorKey,
    UndoneFollow,
)
from federation.activitypub.purge import (
    BATCH,
    KEEP_FOLLOWS,
    KEEP_INBOXES,
    KEEP_RECEIVED,
    KEEP_REMOTE_KEYS,
    KEEP_RETIRED_KEYS,
    ActivityPurge,
)
from federation.activitypub.undone import REMEMBERED

NOW = datetime(2026, 5, 1, tzinfo=UTC)
LONG_AGO = NOW - timedelta(days=400)
MOMENT = timedelta(seconds=1)


def inbox(name: str, **times: datetime) -> ActivityInbox:
    return ActivityInbox(url=f"https://b.example/{name}", server_url="https://b.example", **times)


def key(name: str, retired_at: datetime | None) -> ActivityKey:
    values = {"kind": "rsa", "private": "sealed", "public_pem": "", "created_at": LONG_AGO, "use_from": LONG_AGO}
    return ActivityKey(key_id=name, actor_id="https://a.example/alice", retired_at=retired_at, **values)


def received(name: str, at: datetime, state: ReceivedState) -> ReceivedActivity:
    values = {"type": "Create", "actor": "https://b.example/bob", "text": ""}
    return ReceivedActivity(activity_hash=name, received_at=at, state=state, **values)


async def test_what_is_old_goes(database: Database) -> None:
    """Of an inbox the latest that was found out counts; a key that is in use stays, however old it is."""
    old, used = NOW - KEEP_INBOXES - MOMENT, NOW - KEEP_RETIRED_KEYS
    async with database.transaction() as session:
        session.add_all(
            [
                inbox("gone", gone_at=old),
                inbox("missing", missing_since=LONG_AGO, missing_last=old),
                inbox("tried", gone_at=old, tried_at=NOW),
                inbox("missed", gone_at=old, missing_since=LONG_AGO, missing_last=NOW - KEEP_INBOXES),
                key("former", used - MOMENT),
                key("just retired", used),
                key("in use", None),
                RemoteActorKey(key_id="unused", fetched_at=NOW - KEEP_REMOTE_KEYS - MOMENT),
                RemoteActorKey(key_id="used", fetched_at=NOW - KEEP_REMOTE_KEYS),
                UndoneFollow(follow_hash="old", server_url="", undone_at=NOW - REMEMBERED - MOMENT),
                UndoneFollow(follow_hash="remembered", server_url="", undone_at=NOW - REMEMBERED),
                received("done", NOW - KEEP_RECEIVED - MOMENT, ReceivedState.DONE),
                received("failed", NOW - KEEP_RECEIVED - MOMENT, ReceivedState.FAILED),
                received("known", NOW - KEEP_RECEIVED, ReceivedState.DONE),
            ]
        )
    purge = ActivityPurge(database)
    numbers = {"inboxes": 2, "actor_keys": 1, "remote_keys": 1, "received": 2, "undone_follows": 1, "follows": 0}
    assert await purge(NOW) == numbers
    assert not any((await purge(NOW)).values())
    async with database.read() as session:
        inboxes = (await session.execute(select(ActivityInbox.url))).scalars()
        keys = (await session.execute(select(ActivityKey.key_id))).scalars()
        assert (await session.execute(select(ReceivedActivity.activity_hash))).scalars().all() == ["known"]
        assert list((await session.execute(select(UndoneFollow.follow_hash))).scalars()) == ["remembered"]
        assert sorted(inboxes) == ["https://b.example/missed", "https://b.example/tried"]
        assert sorted(keys) == ["in use", "just retired"]
        assert list((await session.execute(select(RemoteActorKey.key_id))).scalars()) == ["used"]


def follow(local: str, number: int, direction: FollowDirection = FollowDirection.FOLLOWER) -> ActivityFollow:
    remote = f"https://b.example/users/{number}"
    values = {"inbox": f"{remote}/inbox", "state": FollowState.ACCEPTED, "since": LONG_AGO}
    return ActivityFollow(local_actor=local, remote_actor=remote, direction=direction, **values)


async def test_the_follows_of_an_actor_that_was_removed_go(database: Database) -> None:
    """Once nobody is shown it any more: they are of people who never hear of it again, and were kept for good."""
    removed = {"removed": NOW - KEEP_FOLLOWS - MOMENT, "just removed": NOW - KEEP_FOLLOWS, "there": None}
    async with database.transaction() as session:
        for name, at in removed.items():
            session.add(ActivityActor(id=name, name=name, created_at=LONG_AGO, removed_at=at))
            session.add(follow(name, 1, FollowDirection.FOLLOWING))
        session.add_all(follow("removed", number) for number in range(BATCH))
        session.add(follow("unknown", 1))
    assert (await ActivityPurge(database)(NOW))["follows"] == BATCH + 1
    async with database.read() as session:
        left = (await session.execute(select(ActivityFollow.local_actor))).scalars()
        assert sorted(left) == ["just removed", "there", "unknown"]
