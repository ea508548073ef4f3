"""Deliveries owed by plain code, in its own transactions."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import federation
import federation.sync
from tests.federation.conftest import OWN_URL
from tests.federation.sync.conftest import Way, owed
from tests.patience import until
from tests.peer import POSTS_PATH, Peer, introduce
from workers import JobState

SERVER = "https://b.example"
TARGET = f"{SERVER}/api/auth/social/posts"
PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"p"}}'


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
