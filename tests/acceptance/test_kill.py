"""Deliveries survive their worker: `kill -9` at random moments, on every queue the application runs on."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sized
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlmodel import col

from db import DeliveryJob
from federation.app import Federation
from federation.base.jobs import POST_JOB
from federation.base.settings import Settings
from federation.protocol.activities import post_activity
from tests.acceptance.worker_process import WorkerProcess
from tests.federation.protocol.vectors import A
from tests.misbehaving import hang
from tests.patience import LONG_PATIENCE_SECONDS, eventually, until
from tests.peer import POSTS_PATH, Peer, acquaint
from workers import JobState


@pytest.fixture
def environment(queue_settings: dict[str, object], database_file: Path) -> dict[str, str]:
    """Settings of a node that delivers to loopback, with leases of a second and attempts to spare."""
    return {
        "BETTER_AUTH_URL": "https://a.example",
        **A.env,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
        "FEDERATION_LEASE": "1s",
        "FEDERATION_DELIVERY_ATTEMPTS": "100",
        "FEDERATION_MAX_STALLS": "100",
        "FEDERATION_DELIVERY_BACKOFF": "200ms",
        "FEDERATION_DELIVERY_CONCURRENCY": "20",
        "FEDERATION_PER_SERVER": "20",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        **{name.upper(): str(value) for name, value in queue_settings.items()},
    }


@pytest.fixture
async def federation(environment: dict[str, str]) -> AsyncIterator[Federation]:
    """The application's side of the node: it enqueues, the worker process delivers."""
    node = Federation(Settings.from_values(environment))
    yield node
    await node.close()


@pytest.fixture
async def worker(environment: dict[str, str], tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(environment, tmp_path)
    yield process
    process.kill()


@pytest.mark.timeout(900)
async def test_killed_workers_lose_nothing(
    federation: Federation, worker: WorkerProcess, peer: Peer, full: bool
) -> None:
    """Hundreds of deliveries all arrive although their worker is killed again and again; repeats are the same delivery.

    Each worker lives for some deliveries, so that kills strike at work however fast that goes.
    """
    deliveries, kills = (2_000, 8) if full else (600, 4)
    await acquaint(federation, peer)
    sent = await enqueue_posts(federation, peer, deliveries)
    chance = random.Random(f"{sys.argv}{len(sent)}")
    for _ in range(kills):
        await worker.start()
        await until_as_many(len(peer.arrived) + chance.randrange(deliveries // (kills + 1)), peer.arrived)
        await asyncio.sleep(chance.uniform(0, 0.05))
        worker.kill()
        assert len(peer.applied) < deliveries, "there was nothing left to do when it was killed"
    await worker.start()
    await eventually(lambda: rows_left(federation), lambda rows: rows == 0, patience=LONG_PATIENCE_SECONDS)
    counts = Counter(arrived.activity_id for arrived in peer.arrived)
    assert set(counts) == set(sent)
    assert len(peer.applied) == deliveries
    assert peer.refused == []
    assert worker.terminate() == 0
    states = await federation.delivery_queue.storage.counts()
    assert {state: number for state, number in states.items() if number} == {JobState.COMPLETED: deliveries}


@pytest.mark.spread("queue_settings")
async def test_a_delivery_that_always_loses_its_worker_ends(
    environment: dict[str, str], tmp_path: Path, peer: Peer
) -> None:
    """With its attempts used up by dying workers a job fails for good, and its row says so."""
    environment = {**environment, "FEDERATION_DELIVERY_ATTEMPTS": "2", "FEDERATION_LEASE": "500ms"}
    node = Federation(Settings.from_values(environment))
    worker = WorkerProcess(environment, tmp_path)
    peer.server.default = hang()
    try:
        await acquaint(node, peer)
        [delivery] = await enqueue_posts(node, peer, 1)
        for number in range(1, 3):
            await worker.start()
            await until_as_many(number, peer.server.requests)
            worker.kill()
        await worker.start()
        row = await eventually(lambda: settled_row(node), lambda found: found is not None)
        assert row is not None
        assert row.outcome == "retryable"
        assert row.last_error is not None
        assert "worker" in row.last_error
        [status] = await node.delivery_queue.storage.status([row.id])
        assert status is not None
        assert status.state is JobState.FAILED
        assert len(peer.server.requests) == 2, "a third attempt was made"
        assert delivery
    finally:
        worker.kill()
        await node.close()


async def enqueue_posts(federation: Federation, peer: Peer, count: int) -> list[str]:
    """That many posts are owed to the peer; their ids."""
    ids = [f"post-{number}" for number in range(count)]
    for start in range(0, count, 500):
        async with federation.outbox.transaction() as session:
            for post_id in ids[start : start + 500]:
                payload = post_activity(
                    federation_url="https://a.example",
                    post_id=post_id,
                    content=[{"type": "text", "value": "hello"}],
                    author_id="alice",
                    published=datetime.now(UTC),
                    is_private=False,
                )
                assert json.loads(payload)["post"]["id"] == post_id
                await federation.outbox.enqueue_delivery(session, POST_JOB, peer.url + POSTS_PATH, peer.url, payload)
    return ids


async def until_as_many(count: int, items: Sized) -> None:
    await until(lambda: len(items) >= count)


async def rows_left(federation: Federation) -> int:
    async with federation.database.read() as session:
        return (await session.execute(select(func.count()).select_from(DeliveryJob))).scalar_one()


async def settled_row(federation: Federation) -> DeliveryJob | None:
    async with federation.database.read() as session:
        query = select(DeliveryJob).where(col(DeliveryJob.settled_at).is_not(None))
        return (await session.execute(query)).scalars().first()
