"""A server is blacklisted while a worker process delivers to it: its backlog goes without another request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob
from federation.admin import blacklist
from federation.app import Federation
from federation.base.jobs import POST_JOB
from federation.base.settings import Settings
from federation.protocol.activities import post_activity
from tests.acceptance.worker_process import WorkerProcess
from tests.federation.protocol.vectors import A
from tests.misbehaving import respond
from tests.patience import eventually, until
from tests.peer import POSTS_PATH, Peer, acquaint

DELIVERIES = 60


@pytest.fixture
def environment(queue_settings: dict[str, object], database_file: Path) -> dict[str, str]:
    """Settings of a node that delivers to loopback and tries often."""
    return {
        "BETTER_AUTH_URL": "https://a.example",
        **A.env,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
        "FEDERATION_DELIVERY_ATTEMPTS": "20",
        "FEDERATION_DELIVERY_BACKOFF": "100ms",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        **{name.upper(): str(value) for name, value in queue_settings.items()},
    }


@pytest.fixture
async def federation(environment: dict[str, str]) -> AsyncIterator[Federation]:
    """The application's and the administrator's side of the node; the worker process delivers."""
    node = Federation(Settings.from_values(environment))
    yield node
    await node.close()


@pytest.fixture
async def worker(environment: dict[str, str], tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(environment, tmp_path)
    yield process
    process.kill()


@pytest.mark.parametrize("queue_settings", ["sqlite", "postgres", "bullmq"], indirect=True)
async def test_a_rule_stops_the_backlog_of_a_running_worker(
    federation: Federation, worker: WorkerProcess, peer: Peer
) -> None:
    """The peer answers 500, so every delivery is tried again and again; once the rule is in force, all of them fail for
    good, their rows go, and the peer is left alone."""
    await acquaint(federation, peer)
    peer.server.default = respond(500)
    await enqueue_posts(federation, peer)
    await worker.start()
    await until(lambda: len(peer.deliveries) >= 5)
    await blacklist.add(federation.database, "*.127.0.0.1", reason="spam")
    left = select(func.count(col(DeliveryJob.id)))
    await eventually(lambda: count(federation, left), lambda found: found == 0)
    heard = len(peer.server.requests)
    await enqueue_posts(federation, peer)
    refused = select(func.count(col(DeliveryAttempt.id))).where(col(DeliveryAttempt.error_code) == "BLACKLISTED")
    await eventually(lambda: count(federation, refused), lambda found: found >= 2 * DELIVERIES)
    assert len(peer.server.requests) == heard
    assert worker.terminate() == 0


async def count(federation: Federation, query: object) -> int:
    async with federation.database.read() as session:
        return int((await session.execute(query)).scalar_one())  # type: ignore[call-overload] # any select of a number


async def enqueue_posts(federation: Federation, peer: Peer) -> None:
    async with federation.outbox.transaction() as session:
        for number in range(DELIVERIES):
            payload = post_activity(
                federation_url="https://a.example",
                post_id=f"post-{number}",
                content=[{"type": "text", "value": "hello"}],
                author_id="alice",
                published=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
                is_private=False,
            )
            await federation.outbox.enqueue_delivery(session, POST_JOB, peer.url + POSTS_PATH, peer.url, payload)
