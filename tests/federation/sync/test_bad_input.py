"""What plain code should not be handed, and asynchronous code neither: refused by name, and nothing is written."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import federation
import federation.sync
from db import Follow, Post, Server, User, create_host_tables
from federation.sealed.outbound.activities import PublishedPost
from federation.tasks import enqueue_task, task
from tests.federation.sync.conftest import configure_django, owed
from tests.federation.sync.test_sessions import PAYLOAD, SERVER, TARGET
from workers import Job

NOW = datetime(2026, 8, 1, tzinfo=UTC)
BLOCK = [{"type": "text", "value": "hello"}]
USERS = {"follower_id": "alice", "following_id": "bob", "server_url": SERVER}


@task("tests.sync.nothing")
def nothing(job: Job) -> None:
    """Never run."""


PLAIN: dict[str, Callable[[Any], object]] = {
    "enqueue_delivery": lambda given: federation.sync.enqueue_delivery(given, "n", TARGET, SERVER, PAYLOAD),
    "enqueue_fanout": lambda given: federation.sync.enqueue_fanout(given, "n", "/posts", [SERVER], PAYLOAD),
    "publish_post": lambda given: federation.sync.publish_post(given, author_id="alice", content=BLOCK),
    "request_follow": lambda given: federation.sync.request_follow(given, **USERS),
    "request_unfollow": lambda given: federation.sync.request_unfollow(given, **USERS),
    "enqueue_task": lambda given: federation.sync.enqueue_task(nothing, {}, session=given),
}
ASYNCHRONOUS: dict[str, Callable[[Any], Any]] = {
    "enqueue_delivery": lambda given: federation.enqueue_delivery(given, "n", TARGET, SERVER, PAYLOAD),
    "enqueue_fanout": lambda given: federation.enqueue_fanout(given, "n", "/posts", [SERVER], PAYLOAD),
    "publish_post": lambda given: federation.publish_post(given, author_id="alice", content=BLOCK),
    "request_follow": lambda given: federation.request_follow(given, **USERS),
    "request_unfollow": lambda given: federation.request_unfollow(given, **USERS),
    "enqueue_task": lambda given: enqueue_task(nothing, {}, session=given),
}

pytestmark = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


@pytest.mark.parametrize("call", PLAIN)
async def test_an_asynchronous_session_is_sent_to_the_asynchronous_call(
    node: dict[str, str], engine: Engine, call: str
) -> None:
    made = create_async_engine(f"sqlite+aiosqlite:///{engine.url.database}")
    async with AsyncSession(made) as session:
        with pytest.raises(TypeError, match=rf"takes a Session or a Connection.*await federation\.{call}"):
            await asyncio.to_thread(PLAIN[call], session)
        await session.commit()
    await made.dispose()
    assert owed(engine) == set()


@pytest.mark.parametrize("call", ASYNCHRONOUS)
async def test_a_plain_session_is_sent_to_the_plain_call(node: dict[str, str], engine: Engine, call: str) -> None:
    with Session(engine) as session:
        with pytest.raises(TypeError, match=rf"takes an AsyncSession.*federation\.sync\.{call}"):
            await ASYNCHRONOUS[call](session)
        session.commit()
    assert owed(engine) == set()


@pytest.mark.parametrize("call", [call for call in PLAIN if call != "request_follow"])
def test_a_session_on_another_database_is_refused(
    place: dict[str, str], engine: Engine, tmp_path: Path, call: str
) -> None:
    """Both databases are named, and neither has anything of it."""
    elsewhere = create_engine(f"sqlite:///{tmp_path}/elsewhere.sqlite3")
    with Session(elsewhere) as session:
        with pytest.raises(ValueError, match=r"another database, .*elsewhere\.sqlite3.*node\.sqlite3"):
            PLAIN[call](session)
        session.commit()
    with elsewhere.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar_one() == 0
    elsewhere.dispose()
    assert owed(engine) == set()


async def test_an_asynchronous_session_on_another_database_is_refused(
    node: dict[str, str], engine: Engine, tmp_path: Path
) -> None:
    made = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/elsewhere.sqlite3")
    async with AsyncSession(made) as session:
        with pytest.raises(ValueError, match=r"another database, .*elsewhere\.sqlite3"):
            await federation.enqueue_delivery(session, "n", TARGET, SERVER, PAYLOAD)
    await made.dispose()
    assert owed(engine) == set()


def test_what_is_closed_or_in_autocommit_is_refused(place: dict[str, str], engine: Engine) -> None:
    owe = PLAIN["enqueue_delivery"]
    session = Session(engine, close_resets_only=False)
    session.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        owe(session)
    connection = engine.connect()
    connection.close()
    with pytest.raises(ValueError, match="closed"):
        owe(connection)
    automatic = create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with Session(automatic) as session, pytest.raises(ValueError, match="autocommit"):
        owe(session)
    with automatic.connect() as connection, pytest.raises(ValueError, match="autocommit"):
        owe(connection)
    automatic.dispose()
    lite = sqlite3.connect(str(engine.url.database), isolation_level=None)
    with pytest.raises(ValueError, match="autocommit"):
        owe(lite)
    lite.close()
    configure_django()
    from django.db import connection as djangos

    with pytest.raises(ValueError, match=r"transaction\.atomic"):
        owe(djangos)
    with pytest.raises(TypeError, match="not str"):
        owe("sqlite:///node.sqlite3")
    assert owed(engine) == set()


def test_a_transaction_within_a_transaction_is_refused(place: dict[str, str], engine: Engine) -> None:
    """Of one thread: it would wait for itself on SQLite."""
    refused = pytest.raises(RuntimeError, match="pass the outer session on")
    with federation.sync.transaction(), refused, federation.sync.transaction():
        pass
    with federation.sync.transaction() as session:
        PLAIN["enqueue_delivery"](session)
    assert len(owed(engine)) == 1


NOBODY: dict[str, dict[str, Any]] = {
    "publish_post": {"author_id": "nobody", "content": BLOCK},
    "request_follow": {**USERS, "follower_id": "nobody"},
}


@pytest.fixture
def known(engine: Engine) -> None:
    """The node has the host's tables, without a user, and knows the server; keys of other tables are not checked."""
    with engine.begin() as connection:
        create_host_tables(connection)
    with Session(engine) as session, session.begin():
        session.add(
            Server(
                url=SERVER,
                public_key="k",
                encryption_public_key="e",
                last_seen=NOW,
                created_at=NOW,
                updated_at=NOW,
                is_healthy=True,
            )
        )


def left(engine: Engine) -> list[object]:
    with Session(engine) as session:
        return [*session.execute(select(Post.id)).scalars(), *session.execute(select(Follow.id)).scalars()]


@pytest.mark.parametrize("call", NOBODY)
def test_nobody_publishes_or_follows(place: dict[str, str], engine: Engine, known: None, call: str) -> None:
    """In a session of the caller's, of which SQLite checks no foreign key, and in one of ours."""
    called = getattr(federation.sync, call)
    for begun in (Session(engine), federation.sync.transaction()):
        with begun as session:
            with pytest.raises(ValueError, match="there is no user 'nobody' here; `federation users list` shows"):
                called(session, **NOBODY[call])
            if isinstance(begun, Session):
                begun.commit()
    assert (owed(engine), left(engine)) == (set(), [])


@pytest.mark.parametrize("call", NOBODY)
async def test_nobody_publishes_or_follows_asynchronously(
    node: dict[str, str], engine: Engine, known: None, call: str
) -> None:
    """As above."""
    made = create_async_engine(f"sqlite+aiosqlite:///{engine.url.database}")
    for begun in (AsyncSession(made), federation.transaction()):
        async with begun as session:
            with pytest.raises(ValueError, match="there is no user 'nobody' here; `federation users list` shows"):
                await getattr(federation, call)(session, **NOBODY[call])
            if isinstance(begun, AsyncSession):
                await begun.commit()
    await made.dispose()
    assert (owed(engine), left(engine)) == (set(), [])


def test_a_user_whom_the_same_transaction_adds_may_publish(place: dict[str, str], engine: Engine, known: None) -> None:
    """Even in a session that sends nothing to the database by itself."""
    with Session(engine, autoflush=False) as session, session.begin():
        session.add(User(id="alice"))
        post = PLAIN["publish_post"](session)
    assert isinstance(post, PublishedPost)
    assert left(engine) == [post.post_id]
