"""An outage from its first refused delivery to the last one delivered after it, with the node's own workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import func, select
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob, DeliveryState, HoldReason, LinkState
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site
from tests.misbehaving import reset
from tests.patience import eventually
from tests.peer import Peer


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    """Quick where waiting proves nothing."""
    return make_settings(federation_delivery_backoff="20ms", federation_outbox_interval="200ms")


@pytest.fixture
async def workers(federation: Federation) -> AsyncIterator[FederationWorkers]:
    running = FederationWorkers(federation)
    running.start()
    yield running
    await running.stop()


async def states(federation: Federation) -> dict[tuple[DeliveryState, HoldReason | None], int]:
    """How many deliveries there are, by state and what they wait for."""
    query = select(col(DeliveryJob.state), col(DeliveryJob.held_reason), func.count()).group_by(
        col(DeliveryJob.state), col(DeliveryJob.held_reason)
    )
    async with federation.database.read() as session:
        return {(state, reason): count for state, reason, count in await session.execute(query)}


@contextmanager
def away(peer: Peer) -> Iterator[None]:
    """The peer resets every connection until the block ends."""
    served = peer.server.default, dict(peer.server.routes)
    peer.server.default = reset()
    peer.server.routes.clear()
    yield
    peer.server.default = served[0]
    peer.server.routes.update(served[1])


async def jobs(federation: Federation) -> int:
    return sum((await federation.delivery_queue.counts()).values())


async def test_what_an_outage_kept_is_delivered_after_it(
    site: Site, peer: Peer, federation: Federation, workers: FederationWorkers
) -> None:
    """Deliveries to a server that resets connections are held, and all arrive once it is back, with nobody's help."""
    with away(peer):
        await site.owe_posts(peer, 12)
        await eventually(
            lambda: states(federation), lambda found: found == {(DeliveryState.HELD, HoldReason.SERVER): 12}
        )
        link = await federation.links.find(peer.url)
        assert (link.state, link.reason) == (LinkState.DOWN, "CONN_RESET")
        await eventually(lambda: jobs(federation), lambda found: found == 0)  # rows are held before their jobs end

        later = await site.owe_posts(peer, 3)
        assert await jobs(federation) == 0

    await federation.links.look_soon(peer.url)
    await eventually(lambda: states(federation), lambda found: not found)
    assert (len(peer.applied), peer.replayed) == (15, 0)
    async with federation.database.read() as session:
        log = select(col(DeliveryAttempt.series)).where(col(DeliveryAttempt.delivery_id) == later[0])
        assert list((await session.execute(log)).scalars()) == [1]
