"""Refusals that may end: the server shows another key, or does not know us any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select
from sqlmodel import col

from db import DeliveryJob, DeliveryState, HoldReason, LinkState
from federation.base.settings.settings import Settings
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site
from tests.misbehaving import Behaviour, Exchange, Received, respond_with
from tests.patience import eventually, until
from tests.peer import DISCOVER_PATH, Peer, json_answer

TOGETHER = 5
HELD = [(DeliveryState.HELD, HoldReason.SERVER)]


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(
        federation_delivery_concurrency=TOGETHER, federation_per_server=TOGETHER, federation_outbox_interval="200ms"
    )


@pytest.fixture
async def workers(federation: Federation, site: Site, peer: Peer) -> AsyncIterator[FederationWorkers]:
    """At work, and the peer has answered quickly once, so that it may have several deliveries at a time."""
    running = FederationWorkers(federation)
    running.start()
    await site.owe_post(peer)
    await until(lambda: peer.applied)
    yield running
    await running.stop()


@pytest.mark.usefixtures("workers")
async def test_all_that_a_stranger_refuses_is_held(site: Site, peer: Peer, federation: Federation) -> None:
    """One look shows that the name is another's now, and no delivery refused beside the first is given up for it."""
    own, peer.keys = peer.keys, generate_own_keys()
    peer.server.default = together(peer.server.default)

    await site.owe_posts(peer, TOGETHER)

    await eventually(lambda: states(federation), lambda found: found == HELD * TOGETHER)
    assert (await federation.links.find(peer.url)).state is LinkState.MISMATCH
    assert peer.discoveries == ["GET"] * 2  # the second names us, who may know it by another pair than others do
    peer.keys = own
    await federation.links.look_soon(peer.url)
    await eventually(lambda: states(federation), lambda found: not found)
    assert (len(peer.applied), peer.replayed) == (1 + TOGETHER, 0)


@pytest.mark.usefixtures("workers")
async def test_a_server_that_forgot_us_gets_what_it_refused(site: Site, peer: Peer, federation: Federation) -> None:
    """It is told once who we are, and then gets all that it refused until it knew."""
    known = dict(peer.senders)
    peer.senders.clear()
    peer.server.default = together(peer.server.default)

    await site.owe_posts(peer, TOGETHER)

    await eventually(lambda: states(federation), lambda found: not found)
    assert (len(peer.applied), peer.replayed) == (1 + TOGETHER, 0)
    assert peer.senders == known
    assert peer.discoveries == ["GET", "REGISTER"]


@pytest.mark.usefixtures("workers")
async def test_a_server_whose_keys_change_back_gets_what_it_could_not_read(
    site: Site, peer: Peer, federation: Federation
) -> None:
    """The look shows the key that it could not use a moment before, so the delivery is tried once more."""
    well = peer.server.default

    async def changes_back(request: Received, exchange: Exchange) -> None:
        peer.server.default = well
        await discover(request, exchange)

    discover = peer.server.routes[DISCOVER_PATH]
    peer.server.default = respond_with(lambda _: json_answer({"code": "DECRYPT_FAILED"}, 400))
    peer.server.routes[DISCOVER_PATH] = changes_back

    await site.owe_post(peer)

    await until(lambda: len(peer.applied) == 2)
    await eventually(lambda: states(federation), lambda found: not found)


def together(behaviour: Behaviour) -> Behaviour:
    """`behaviour`, for the first few requests not before all of them are there."""
    all_there = asyncio.Event()
    there = 0

    async def behave(request: Received, exchange: Exchange) -> None:
        nonlocal there
        there += 1
        if there >= TOGETHER:
            all_there.set()
        await all_there.wait()
        await behaviour(request, exchange)

    return behave


async def states(federation: Federation) -> list[tuple[DeliveryState, HoldReason | None]]:
    """Of each delivery that is not over well."""
    async with federation.database.read() as session:
        query = select(col(DeliveryJob.state), col(DeliveryJob.held_reason))
        return [(state, reason) for state, reason in await session.execute(query)]
