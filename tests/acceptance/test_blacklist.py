"""A server is blacklisted while a worker process delivers to it: its backlog goes without another request."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob
from federation.admin import blacklist
from federation.runtime.composition import Federation
from tests.acceptance.site import numbered, owe
from tests.acceptance.worker_process import WorkerProcess
from tests.misbehaving import respond
from tests.patience import eventually, until
from tests.peer import Peer, acquaint

DELIVERIES = 60


@pytest.fixture
def environment(
    base_environment: dict[str, str], queue_settings: dict[str, object], database_file: Path
) -> dict[str, str]:
    """Settings of a node that delivers to loopback and tries often."""
    return {
        **base_environment,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "FEDERATION_DELIVERY_ATTEMPTS": "20",
        "FEDERATION_DELIVERY_BACKOFF": "100ms",
        **{name.upper(): str(value) for name, value in queue_settings.items()},
    }


@pytest.mark.parametrize("queue_settings", ["sqlite", "postgres", "bullmq"], indirect=True)
async def test_a_rule_stops_the_backlog_of_a_running_worker(
    federation: Federation, worker: WorkerProcess, peer: Peer
) -> None:
    """The peer answers 500, so every delivery is tried again and again; once the rule is in force, all of them fail for
    good, their rows go, and the peer is left alone."""
    await acquaint(federation, peer)
    peer.server.default = respond(500)
    await owe(federation, peer, numbered("post", DELIVERIES))
    await worker.start()
    await until(lambda: len(peer.deliveries) >= 5)
    await blacklist.add(federation.database, "*.127.0.0.1", reason="spam")
    left = select(func.count(col(DeliveryJob.id)))
    await eventually(lambda: count(federation, left), lambda found: found == 0)
    heard = len(peer.server.requests)
    await owe(federation, peer, numbered("post", DELIVERIES))
    refused = select(func.count(col(DeliveryAttempt.id))).where(col(DeliveryAttempt.error_code) == "BLACKLISTED")
    await eventually(lambda: count(federation, refused), lambda found: found >= 2 * DELIVERIES)
    assert len(peer.server.requests) == heard
    assert worker.terminate() == 0


async def count(federation: Federation, query: object) -> int:
    async with federation.database.read() as session:
        return int((await session.execute(query)).scalar_one())  # type: ignore[call-overload] # any select of a number
