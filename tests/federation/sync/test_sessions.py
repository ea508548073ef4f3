"""Deliveries owed by plain code, in its own transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

import federation
import federation.sync
from tests.federation.conftest import OWN_URL
from tests.federation.protocol.vectors import A
from tests.patience import until
from tests.peer import POSTS_PATH, Peer, introduce

PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"p"}}'


@pytest.fixture(autouse=True)
async def _process(
    empty_environment: Path, monkeypatch: pytest.MonkeyPatch, database_file: Path
) -> AsyncIterator[None]:
    """The environment of a node with everything in one SQLite file; what a test opens is closed."""
    environment = {
        "BETTER_AUTH_URL": OWN_URL,
        **A.env,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    federation.sync.close()
    await federation.close_federation()


@pytest.fixture
def engine(database_file: Path) -> Iterator[Engine]:
    """The application's own engine on the node's database."""
    made = create_engine(f"sqlite:///{database_file}")
    yield made
    made.dispose()


async def test_what_a_session_commits_is_delivered(peer: Peer, engine: Engine) -> None:
    """And what it rolls back never was."""
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
