"""Deliveries owed by plain code, in its own transactions."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

import federation
import federation.sync
from db import Follow, User, create_host_tables
from tests.federation.conftest import OWN_URL
from tests.federation.delivery.harness import post_payload
from tests.federation.sync.conftest import Way, owed
from tests.patience import until
from tests.peer import POSTS_PATH, Peer, introduce
from workers import JobState

SERVER = "https://b.example"
TARGET = f"{SERVER}/api/auth/social/posts"
PAYLOAD = post_payload("p")


class Interrupted(Exception):
    """What a test raises in a transaction."""


def owe(caller: federation.sync.Caller) -> str:
    return federation.sync.enqueue_delivery(caller, "deliver-post", TARGET, SERVER, PAYLOAD)


async def queued() -> set[str]:
    """Ids of the jobs in the queue."""
    queue = federation.get_federation_queue()
    await queue.start()
    return {job.id for job in (await queue.storage.list(JobState.QUEUED)).jobs}


async def test_what_is_committed_is_owed_and_gets_its_job(node: dict[str, str], way: Way, engine: Engine) -> None:
    """Through whatever it is written; what is rolled back never was."""

    def plain() -> set[str]:
        with suppress(Interrupted), way.transaction() as caller:
            owe(caller)
            raise Interrupted
        with way.transaction() as caller:
            ids = {owe(caller), owe(caller)}
            assert owed(engine) == set()
        assert owed(engine) == ids
        return ids

    ids = await asyncio.to_thread(plain)

    async def has_jobs() -> bool:
        return await queued() == ids

    await until(has_jobs)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_what_plain_code_owes_is_delivered(node: dict[str, str], peer: Peer, engine: Engine) -> None:
    """By the workers of an event loop of the same process."""
    introduce(peer, OWN_URL)
    await federation.discover_and_register(peer.url)
    with Session(engine) as session:
        federation.sync.enqueue_delivery(session, "deliver-post", peer.url + POSTS_PATH, peer.url, PAYLOAD)
        session.rollback()
        federation.sync.enqueue_delivery(session, "deliver-post", peer.url + POSTS_PATH, peer.url, PAYLOAD)
        session.commit()
    await federation.start_federation_worker()
    await until(lambda: peer.applied)
    assert len(peer.applied) == 1


@pytest.mark.parametrize("place", ["sqlite", "bullmq-postgres"], indirect=True)
async def test_savepoints_keep_and_take_what_is_owed_in_them(node: dict[str, str], engine: Engine) -> None:
    """Of a session and of a connection: what a savepoint rolled back gets no job, and the rest stays."""
    with Session(engine) as session, session.begin():
        with suppress(Interrupted), session.begin_nested():
            owe(session)
            raise Interrupted
        with session.begin_nested():
            first = owe(session)
    with engine.begin() as connection:
        with suppress(Interrupted), connection.begin_nested():
            owe(connection)
            raise Interrupted
        with connection.begin_nested():
            second = owe(connection)
    assert owed(engine) == {first, second}

    async def has_jobs() -> bool:
        return await queued() == {first, second}

    await until(has_jobs)


@pytest.mark.parametrize("place", ["sqlite", "bullmq-postgres"], indirect=True)
async def test_users_calls_are_owed_by_plain_code(node: dict[str, str], peer: Peer, engine: Engine) -> None:
    """A follow, with the discovery of its server, a post to that follower's server, and an unfollow."""
    introduce(peer, OWN_URL)
    users = {"follower_id": "alice", "following_id": "bob", "server_url": peer.url}
    with engine.begin() as connection:
        create_host_tables(connection)
    with Session(engine) as session, session.begin():
        session.add_all([User(id="alice"), User(id="bob")])

    def plain() -> str | None:
        with federation.sync.transaction() as session:
            with pytest.raises(ValueError, match="there is no user 'nobody' here"):
                federation.sync.request_follow(session, **{**users, "follower_id": "nobody"})
            assert peer.server.connections == 0
        with federation.sync.transaction() as session:
            federation.sync.request_follow(session, **users)
        with federation.sync.transaction() as session:
            session.execute(update(Follow).values(accepted=True))
            block = [{"type": "text", "value": "hello"}]
            assert len(federation.sync.publish_post(session, author_id="bob", content=block).delivery_ids) == 1
            many = [peer.url, SERVER]
            assert len(federation.sync.enqueue_fanout(session, "n", "/posts", many, PAYLOAD)) == 2
        with federation.sync.transaction() as session:
            return federation.sync.request_unfollow(session, **users)

    assert await asyncio.to_thread(plain) is None  # the follow was never sent
    assert len(owed(engine)) == 3
