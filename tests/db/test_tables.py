"""Rows and columns: times, enums, JSON, defaults, and what a repr keeps to itself."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import delete, select, text
from sqlalchemy.exc import IntegrityError, StatementError

from db import (
    AttemptOutcome,
    Block,
    Database,
    DeliveryAttempt,
    DeliveryJob,
    Follow,
    Post,
    Server,
    ServerHealth,
    ServerHealthEvent,
    User,
    create_host_tables,
    new_timed_id,
)

NOW = datetime(2025, 3, 30, 2, 30, 0, 123456, tzinfo=UTC)


def server(name: str) -> Server:
    return Server(
        url=f"https://{name}.example",
        public_key=f"{name}-signing",
        encryption_public_key=f"{name}-encryption",
        last_seen=NOW,
        created_at=NOW,
        updated_at=NOW,
        is_healthy=True,
    )


def job(**values: object) -> DeliveryJob:
    return DeliveryJob(**{"target_url": "https://b.example/x", "payload": "top-secret", "created_at": NOW, **values})


async def test_times_are_utc_wall_clock_in_the_database_and_aware_in_python(database: Database) -> None:
    """Another zone's time is converted on the way in and compares by instant in queries."""
    tokyo = timezone(timedelta(hours=9))
    async with database.transaction() as session:
        session.add(job(id="d", created_at=NOW.astimezone(tokyo)))
    async with database.read() as session:
        stored = (await session.execute(text("SELECT CAST(created_at AS text) FROM delivery_jobs"))).scalar_one()
        earlier = select(DeliveryJob).where(DeliveryJob.created_at <= NOW.astimezone(tokyo))
        found = (await session.execute(earlier)).scalar_one()
    assert stored == "2025-03-30 02:30:00.123456"
    assert found.created_at == NOW
    assert found.created_at.tzinfo is UTC


async def test_a_naive_time_is_refused_and_the_error_hides_the_row(database: Database) -> None:
    """The error says what to pass instead; the payload beside it is not shown."""
    with pytest.raises(StatementError, match="naive datetime 2025-01-01T00:00:00: pass an aware one") as caught:
        async with database.transaction() as session:
            session.add(job(created_at=datetime(2025, 1, 1)))  # noqa: DTZ001 - the naive value is the point
    assert "top-secret" not in str(caught.value)


async def test_new_rows_get_the_defaults_of_the_original(database: Database) -> None:
    """Ids are made here; counters and flags start where the original's database defaults put them."""
    async with database.transaction() as session:
        session.add_all([server("b"), job(), Follow(follower_id="a", following_id="b", created_at=NOW)])
    async with database.read() as session:
        found = (await session.execute(select(DeliveryJob))).scalar_one()
        follow = (await session.execute(select(Follow))).scalar_one()
        peer = (await session.execute(select(Server))).scalar_one()
    assert (found.attempts, found.job_name, found.settled_at, len(found.id)) == (0, None, None, 36)
    assert (follow.accepted, follow.acknowledged, follow.follower_server_url) == (False, False, None)
    assert (peer.health_check_attempts, peer.unhealthy_reason) == (0, None)


async def test_enums_are_text_in_the_database_and_members_in_python(database: Database) -> None:
    """The attempt log and the health history number their rows and give their enums back."""
    async with database.transaction() as session:
        session.add_all(
            DeliveryAttempt(
                delivery_id="d",
                job_name="deliver-post",
                server_url="https://b.example",
                attempt=number,
                started_at=NOW,
                duration_ms=12,
                outcome=AttemptOutcome.PARKED,
            )
            for number in (1, 2)
        )
        session.add(
            ServerHealthEvent(
                server_url="https://b.example",
                from_state=ServerHealth.HEALTHY,
                to_state=ServerHealth.UNHEALTHY,
                reason="TIMEOUT",
                at=NOW,
            )
        )
    async with database.read() as session:
        attempts = (await session.execute(select(DeliveryAttempt).order_by(text("id")))).scalars().all()
        event = (await session.execute(select(ServerHealthEvent))).scalar_one()
        stored = (await session.execute(text("SELECT outcome FROM delivery_attempts"))).scalars().all()
    assert [(row.id, row.outcome) for row in attempts] == [(1, AttemptOutcome.PARKED), (2, AttemptOutcome.PARKED)]
    assert isinstance(attempts[0].outcome, AttemptOutcome)
    assert event.to_state is ServerHealth.UNHEALTHY
    assert stored == ["parked", "parked"]


async def test_forgetting_a_server_deletes_its_follows(database: Database) -> None:
    """The cascade works on both databases, and a follow of an unknown server is refused."""
    async with database.transaction() as session:
        session.add(server("b"))
        await session.flush()
        session.add(Follow(follower_id="a", following_id="b", follower_server_url="https://b.example", created_at=NOW))
    async with database.transaction() as session:
        await session.execute(delete(Server))
    async with database.read() as session:
        assert (await session.execute(select(Follow))).scalars().all() == []
    with pytest.raises(IntegrityError):
        async with database.transaction() as session:
            session.add(Follow(follower_id="a", following_id="b", following_server_url="https://x", created_at=NOW))


async def test_host_tables_hold_json_and_need_a_user(database: Database) -> None:
    """Created twice without harm; content comes back as it went in, and a user's posts and blocks go with the user."""
    content = [{"type": "text", "value": "naïve ☃"}]
    async with database.transaction() as session:
        connection = await session.connection()
        await connection.run_sync(create_host_tables)
        await connection.run_sync(create_host_tables)
        session.add_all([User(id="alice"), User(id="bob")])
        await session.flush()
        session.add(Post(content=content, author_id="alice", published=NOW, created_at=NOW))
        session.add(Block(blocker_id="alice", blocked_user_id="bob", created_at=NOW))
    async with database.read() as session:
        post = (await session.execute(select(Post))).scalar_one()
        alice = await session.get(User, "alice")
    assert (post.content, post.is_local, post.is_private) == (content, False, False)
    assert alice is not None
    assert (alice.is_private, alice.post_propagation_policy) == (False, "all")
    async with database.transaction() as session:
        await session.execute(delete(User).where(User.id == "alice"))
    async with database.read() as session:
        assert (await session.execute(select(Post))).scalars().all() == []
        assert (await session.execute(select(Block))).scalars().all() == []


def test_a_repr_shows_no_payload() -> None:
    """Log lines may carry a row."""
    assert "top-secret" not in repr(job())
    assert "https://b.example/x" in repr(job())


def test_ids_by_time_sort_as_they_were_made() -> None:
    """From one millisecond to the next; within one they are at random, and none comes twice."""
    made = [new_timed_id()]
    while len({each[:13] for each in made}) < 4:
        made.append(new_timed_id())
    assert [each[:13] for each in made] == sorted(each[:13] for each in made)
    assert len(set(made)) == len(made)
    assert {(uuid.UUID(each).version, uuid.UUID(each).variant) for each in made} == {(7, uuid.RFC_4122)}
    now = datetime.now(UTC).timestamp() * 1000
    assert now - 60_000 < uuid.UUID(made[-1]).int >> 80 <= now
