"""From the first failed delivery to the healing probe, through real workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select
from sqlmodel import col
from structlog.testing import capture_logs

from db import Server, ServerHealthEvent
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import post_payload
from tests.patience import until
from tests.peer import POSTS_PATH, Peer, acquaint

pytestmark = pytest.mark.spread("queue_settings", always=("bullmq",))

PAYLOAD = post_payload("p")

QUICK = {
    "federation_delivery_attempts": 1,
    # The failed delivery marks the server, and its link's fall again: probes count from the second mark.
    "federation_health_first_delay": "1s",
    "federation_health_step": "10ms",
}


@pytest.fixture
async def federation(make_settings: MakeSettings, queue_settings: dict[str, object]) -> AsyncIterator[Federation]:
    """A node with workers at work; a delivery is tried once, probes come quickly."""
    node = Federation(make_settings(**QUICK, **queue_settings))
    workers = FederationWorkers(node)
    workers.start()
    yield node
    await workers.stop()
    await node.close()


async def row(federation: Federation) -> Server:
    async with federation.database.read() as session:
        return (await session.execute(select(Server))).scalar_one()


async def deliver(federation: Federation, peer: Peer) -> None:
    async with federation.outbox.transaction() as session:
        await federation.outbox.enqueue_delivery(session, "deliver-post", peer.url + POSTS_PATH, peer.url, PAYLOAD)


async def test_a_peer_that_dies_and_comes_back_is_healed_by_what_was_held(federation: Federation, peer: Peer) -> None:
    """Unhealthy with the failed delivery, and probed while down. The first probe that finds it well has what is held
    sent ahead, and that arrives. Both changes are on record."""
    await acquaint(federation, peer)
    await peer.server.stop()
    await deliver(federation, peer)

    async def was_probed() -> bool:
        return (await row(federation)).health_check_attempts >= 1

    async def is_healthy() -> bool:
        return (await row(federation)).is_healthy

    await until(was_probed)
    sick = await row(federation)
    assert (sick.is_healthy, sick.unhealthy_reason) == (False, "CONN_REFUSED")
    await peer.server.start()
    await until(is_healthy)
    assert (await row(federation)).health_check_attempts == 0
    async with federation.database.read() as session:
        events = (await session.execute(select(ServerHealthEvent).order_by(col(ServerHealthEvent.id)))).scalars().all()
    assert [(event.from_state, event.to_state, event.reason) for event in events] == [
        ("healthy", "unhealthy", "CONN_REFUSED"),
        ("unhealthy", "healthy", "delivered"),
    ]
    assert len(peer.deliveries) == 1


async def test_a_peer_that_stays_away_is_probed_five_times(federation: Federation, peer: Peer) -> None:
    """Then a warning, and no job is left."""
    await acquaint(federation, peer)
    await peer.server.stop()
    with capture_logs() as logs:
        await deliver(federation, peer)

        async def is_exhausted() -> bool:
            return "health_checks_exhausted" in [entry["event"] for entry in logs]

        await until(is_exhausted)
    assert len([entry for entry in logs if entry["event"] == "health_probe"]) == 5
    assert (await row(federation)).health_check_attempts == 5

    async def is_idle() -> bool:
        return not any((await federation.health_check_queue.storage.counts()).values())

    await until(is_idle)
