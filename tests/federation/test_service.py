"""What application services import: one node per process, made from the environment on first use."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlmodel import col

import federation
from db import Database, DeliveryJob, Follow, Server, User, create_host_tables
from federation.delivery.errors import PermanentFailure
from federation.protocol.acks import Ack
from tests.federation.conftest import OWN_URL
from tests.federation.delivery.harness import post_payload
from tests.federation.protocol.vectors import FOLLOW_ACK, A, B
from tests.patience import until
from tests.peer import POSTS_PATH, Peer, introduce
from workers import Job

PAYLOAD = post_payload("p")


@pytest.fixture(autouse=True)
async def _process(
    empty_environment: Path, monkeypatch: pytest.MonkeyPatch, database_file: Path, redis_url: str, queue_prefix: str
) -> AsyncIterator[None]:
    """The environment of a node with its queues on BullMQ; what a test opens is closed."""
    environment = {
        "BETTER_AUTH_URL": OWN_URL,
        **A.env,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "REDIS_URL": redis_url,
        "FEDERATION_QUEUE_PREFIX": queue_prefix,
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    await federation.close_federation()


@pytest.fixture
async def database(database_file: Path) -> AsyncIterator[Database]:
    """A view of the node's database from outside."""
    opened = Database(f"sqlite:///{database_file}")
    yield opened
    await opened.close()


async def test_the_workers_start_once_and_deliver(peer: Peer) -> None:
    """A second start returns the same pair; a delivery enqueued in a transaction arrives."""
    pair = await federation.start_federation_worker()
    assert await federation.start_federation_worker() is pair
    assert all(callable(running.stop) for running in pair)
    introduce(peer, OWN_URL)
    await federation.discover_and_register(peer.url)
    async with federation.transaction() as session:
        await federation.enqueue_delivery(session, "deliver-post", peer.url + POSTS_PATH, peer.url, PAYLOAD)
    await until(lambda: peer.applied)
    await federation.close_federation()
    assert all(running.task.done() for running in pair)
    assert await federation.start_federation_worker() is not pair


async def test_closing_twice_or_without_use_does_nothing() -> None:
    """Nothing was opened, nothing has to be closed."""
    await federation.close_federation()
    federation.get_federation_queue()
    await federation.close_federation()
    await federation.close_federation()


async def test_queues_and_connections_are_singletons_until_closed() -> None:
    """Four different things, each always the same."""
    getters = (
        federation.get_federation_queue,
        federation.get_health_check_queue,
        federation.get_redis_connection,
        federation.get_redis_worker_connection,
    )
    first = [getter() for getter in getters]
    assert [getter() for getter in getters] == first
    assert len({id(each) for each in first}) == 4
    assert federation.get_federation_queue().storage.queue == federation.DELIVERY_QUEUE_NAME == "federation-delivery"
    assert (
        federation.get_health_check_queue().storage.queue
        == federation.HEALTH_CHECK_QUEUE_NAME
        == "federation-health-check"
    )
    await federation.close_federation()
    assert federation.get_federation_queue() is not first[0]


async def test_without_a_redis_the_connections_are_refused_and_the_queues_embedded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names the variable; adding a job works all the same."""
    monkeypatch.delenv("REDIS_URL")
    for getter in (federation.get_redis_connection, federation.get_redis_worker_connection):
        with pytest.raises(federation.ConfigurationError, match="REDIS_URL: not set"):
            getter()
    assert (await federation.get_federation_queue().add("deliver-post", {})).id


async def test_malformed_settings_are_told_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not remembered: a corrected environment works."""
    monkeypatch.setenv("FEDERATION_PORT", "http")
    with pytest.raises(federation.ConfigurationError, match="FEDERATION_PORT"):
        await federation.start_federation_worker()
    monkeypatch.delenv("FEDERATION_PORT")
    assert len(await federation.start_federation_worker()) == 2


async def test_tasks_that_cannot_be_imported_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not remembered either."""
    monkeypatch.setenv("FEDERATION_TASKS", "nobody.has_this")
    with pytest.raises(federation.ConfigurationError, match=r"nobody\.has_this cannot be imported"):
        await federation.start_federation_worker()
    await federation.close_federation()
    monkeypatch.delenv("FEDERATION_TASKS")
    assert len(await federation.start_federation_worker()) == 2


async def test_a_worker_that_died_does_not_keep_the_rest_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised, and the next use starts afresh."""
    monkeypatch.delenv("REDIS_URL")
    monkeypatch.setenv("QUEUE_URL", "sqlite:///no-tables.db")
    pair = await federation.start_federation_worker()
    await asyncio.wait([running.task for running in pair])
    with pytest.raises(ExceptionGroup):
        await federation.close_federation()
    monkeypatch.delenv("QUEUE_URL")
    again = await federation.start_federation_worker()
    assert again is not pair


async def test_a_health_check_is_scheduled_under_the_agreed_id() -> None:
    """The job other implementations would schedule."""
    await federation.schedule_health_check("https://remote.example.com", 0)
    await federation.schedule_health_check("https://remote.example.com", 0)
    status = await federation.get_health_check_queue().get_status("health-check_d4b64e4b29f0e3be_0")
    assert status is not None
    assert status.name == "health-check"


async def test_health_is_marked_by_hand(peer: Peer) -> None:
    """Unhealthy schedules a probe, healthy ends it."""
    await federation.discover_and_register(peer.url)
    await federation.mark_server_unhealthy(peer.url, "TIMEOUT")
    assert not (await federation.discover_and_register(peer.url)).is_healthy
    counts = await federation.get_health_check_queue().storage.counts()
    assert counts["scheduled"] == 1  # type: ignore[index] # a StrEnum's member is its text
    await federation.mark_server_healthy(peer.url)
    assert (await federation.discover_and_register(peer.url)).is_healthy


async def test_the_producers_write_in_the_callers_transaction(peer: Peer, database: Database) -> None:
    """Follow, post and unfollow, all by module functions."""
    async with database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
        session.add(User(id="alice"))
    async with federation.transaction() as session:
        requested = await federation.request_follow(
            session, follower_id="alice", following_id="bob", server_url=peer.url
        )
    async with database.transaction() as session:
        (await session.get_one(Follow, requested.follow_id)).accepted = True
        (await session.get_one(DeliveryJob, requested.delivery_id)).attempts = 1  # or the unfollow would cancel it
    async with federation.transaction() as session:
        published = await federation.publish_post(
            session, author_id="alice", content=[{"type": "text", "value": "hello"}]
        )
    async with federation.transaction() as session:
        unfollowed = await federation.request_unfollow(
            session, follower_id="alice", following_id="bob", server_url=peer.url
        )
    async with database.read() as session:
        owed = await session.execute(select(col(DeliveryJob.id), col(DeliveryJob.job_name)))
        names = {row.id: row.job_name for row in owed}
    assert names == {
        requested.delivery_id: "deliver-follow",
        published.delivery_ids[0]: "deliver-post",
        unfollowed: "deliver-unfollow",
    }


async def test_deliveries_of_one_ordering_key_are_held_behind_the_oldest(peer: Peer, database: Database) -> None:
    """Single ones and those of a fan-out, to each server for itself."""
    async with federation.transaction() as session:
        for _ in range(2):
            await federation.enqueue_delivery(
                session, "deliver-post", peer.url + POSTS_PATH, peer.url, PAYLOAD, ordering_key="post-1"
            )
        servers = [peer.url, "https://c.example"]
        await federation.enqueue_fanout(session, "deliver-post", POSTS_PATH, servers, PAYLOAD, ordering_key="post-1")
    async with database.read() as session:
        owed = select(col(DeliveryJob.server_url), col(DeliveryJob.held_reason)).order_by(
            col(DeliveryJob.server_url), col(DeliveryJob.ordering_position)
        )
        found = [tuple(row) for row in await session.execute(owed)]
    assert sorted(found, key=str) == sorted(
        [(peer.url, None), (peer.url, "order"), (peer.url, "order"), ("https://c.example", None)], key=str
    )


async def test_an_acknowledgment_is_applied_by_hand(database: Database) -> None:
    """A known follow is accepted and the delivery's row gone; for an unknown one the answer is False."""
    ack = Ack(data=FOLLOW_ACK.envelope, signature=FOLLOW_ACK.signature)
    public_key = B.env["FEDERATION_PUBLIC_KEY"]
    await add_row(database, "d1")
    assert not await federation.handle_follow_ack(ack, "https://b.example", public_key, "d1")
    assert await rows(database) == []
    async with database.transaction() as session:
        session.add(Server.model_validate(SERVER))
        await session.flush()
        session.add(
            Follow(
                id="f",
                follower_id="user-a",
                following_id="user-b",
                follower_server_url="https://b.example",
                created_at=datetime.now(UTC),
            )
        )
    await add_row(database, "d2")
    assert await federation.handle_follow_ack(ack, "https://b.example", None, "d2", "job-7")
    async with database.read() as session:
        assert (await session.get_one(Follow, "f")).accepted
    assert await rows(database) == []


async def test_an_acknowledgment_that_is_not_the_servers_fails_for_good(database: Database) -> None:
    """The row is gone all the same."""
    await add_row(database, "d1")
    forged = Ack(data=FOLLOW_ACK.envelope, signature="AAAA")
    with pytest.raises(PermanentFailure):
        await federation.handle_follow_ack(forged, "https://b.example", B.env["FEDERATION_PUBLIC_KEY"], "d1")
    assert await rows(database) == []


async def test_a_node_without_keys_cannot_open_acknowledgments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable."""
    for name in A.env:
        monkeypatch.delenv(name)
    with pytest.raises(federation.ConfigurationError, match="FEDERATION_ENCRYPTION_PRIVATE_KEY"):
        await federation.handle_follow_ack(Ack(data={}, signature=""), "https://b.example", None, "d1")


async def test_the_processors_take_a_job_without_a_worker(peer: Peer, database: Database) -> None:
    """As a stock worker of BullMQ calls them."""
    introduce(peer, OWN_URL)
    data = federation.FederationDeliveryJob(
        delivery_job_id="d1", target_url=peer.url + POSTS_PATH, server_url=peer.url, payload=PAYLOAD
    ).to_wire()
    await add_row(database, "d1")
    await federation.process_federation_delivery(job("deliver-post", data))
    assert [arrived.activity_id for arrived in peer.applied] == ["p"]
    assert await rows(database) == []
    await federation.process_health_check(job("health-check", {"serverUrl": peer.url}))


async def test_the_process_fetches_through_its_guard(peer: Peer) -> None:
    """A peer named in DEV_ALLOWED_HOSTNAMES is reached, with the whole response."""
    fetched = await federation.federation_fetch(peer.url + "/discover")
    assert (fetched.response.status, fetched.peer) == (200, None)


def test_every_public_name_exists() -> None:
    """What the package promises can be imported from it."""
    assert all(hasattr(federation, name) for name in federation.__all__)
    assert [name for name in dir(federation) if not name.startswith("__")] == sorted(federation.__all__)


IMPORT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
import federation, federation.cli, federation.workers
assert all(hasattr(federation, name) for name in federation.__all__)
found = {{"fastapi", "uvicorn", "starlette", "bullmq", "redis", "psycopg"}} & sys.modules.keys()
assert not found, found
"""


def test_importing_the_package_needs_no_extra() -> None:
    """No server framework, no Redis client and no PostgreSQL driver is imported, installed or not."""
    missing = ("fastapi", "uvicorn", "starlette", "bullmq", "redis", "psycopg", "rich", "pyspark")
    done = subprocess.run([sys.executable, "-c", IMPORT.format(missing=missing)], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


SERVER = {
    "id": "s",
    "url": "https://b.example",
    "public_key": B.env["FEDERATION_PUBLIC_KEY"],
    "encryption_public_key": B.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
    "last_seen": datetime(2026, 1, 1, tzinfo=UTC),
    "created_at": datetime(2026, 1, 1, tzinfo=UTC),
    "updated_at": datetime(2026, 1, 1, tzinfo=UTC),
    "is_healthy": True,
}


def job(name: str, payload: object) -> Job:
    return Job(id="1", name=name, payload=payload, attempt=1, max_attempts=5, created_at=datetime.now(UTC))


async def add_row(database: Database, delivery_id: str) -> None:
    async with database.transaction() as session:
        session.add(DeliveryJob(id=delivery_id, target_url="t", payload="{}", created_at=datetime.now(UTC)))


async def rows(database: Database) -> list[str]:
    async with database.read() as session:
        return list((await session.execute(select(col(DeliveryJob.id)))).scalars())
