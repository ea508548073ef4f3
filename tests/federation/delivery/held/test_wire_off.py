"""What is held for a wire that this node does not have: it waits, and keeps nothing of the others from going out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from db import DEFAULT_WIRE, DeliveryJob, DeliveryState, HoldReason, new_id
from federation.activitypub.activities import WIRE
from federation.base.queues.job_data import ACTIVITY_JOB, POST_JOB
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from federation.servers.link_rules import HEARD_INTERVAL
from tests.federation.conftest import MakeSettings
from workers.clock import ManualClock

SEALED, DEAD = "https://b.example", "https://dead.example"
MINUTE = timedelta(minutes=1)
ROOM = 2
"""So many released deliveries may wait: twice as many as there are slots."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(datetime.now(UTC))


@asynccontextmanager
async def node_of(settings: Settings, clock: ManualClock) -> AsyncIterator[Federation]:
    made = Federation(settings, clock=clock)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def node(make_settings: MakeSettings, database_url: str, clock: ManualClock) -> AsyncIterator[Federation]:
    """It has the sealed wire alone."""
    settings = make_settings(database_url=database_url, federation_delivery_concurrency=1)
    async with node_of(settings, clock) as made:
        yield made


async def owed(node: Federation, server: str = DEAD, *, wire: str = WIRE, **values: object) -> str:
    """A delivery that is held for its server, unless `values` say otherwise; its id."""
    now, delivery = node.clock.now(), new_id()
    row = {
        "id": delivery,
        "job_id": delivery,
        "target_url": f"{server}/inbox",
        "server_url": server,
        "payload": "{}",
        "wire": wire,
        "job_name": ACTIVITY_JOB if wire == WIRE else POST_JOB,
        "created_at": now,
        "state": DeliveryState.HELD,
        "held_reason": HoldReason.SERVER,
        "held_at": now,
        **values,
    }
    async with node.database.transaction() as session:
        session.add(DeliveryJob(**row))
    return delivery


async def falls(node: Federation, server: str = DEAD, *, wire: str = WIRE) -> None:
    await node.links.of(wire).exhausted(server, "TIMEOUT", first_attempted_at=node.clock.now() - MINUTE)


async def state_of(node: Federation, delivery: str) -> DeliveryState:
    async with node.database.read() as session:
        row = await session.get(DeliveryJob, delivery)
    assert row is not None
    return row.state


async def test_its_servers_are_looked_at_once_the_node_has_it(
    node: Federation, make_settings: MakeSettings, database_url: str, clock: ManualClock
) -> None:
    """A canary before that would lie in a queue on which nobody works."""
    await falls(node)
    delivery = await owed(node)
    clock.advance(timedelta(days=1))
    assert await node.link_probes.tick() == 0
    assert await state_of(node, delivery) is DeliveryState.HELD

    async with node_of(make_settings(database_url=database_url, federation_activitypub=True), clock) as on:
        assert await on.link_probes.tick() == 1
        assert await state_of(on, delivery) is DeliveryState.READY


async def test_what_of_it_waits_takes_up_no_room(node: Federation, clock: ManualClock) -> None:
    """It was released while the node had the wire, and is not tried until it has it again."""
    for _ in range(ROOM):
        now = clock.now()
        await owed(node, state=DeliveryState.READY, held_reason=None, held_at=None, released_at=now)
    await falls(node, SEALED, wire=DEFAULT_WIRE)
    delivery = await owed(node, SEALED, wire=DEFAULT_WIRE)
    await node.links.returned(SEALED, reason="operator")
    assert await node.releaser.tick() == 1
    assert await state_of(node, delivery) is DeliveryState.READY


async def test_its_releases_stand_still_until_the_node_has_it(
    node: Federation, make_settings: MakeSettings, database_url: str, clock: ManualClock
) -> None:
    await falls(node)
    delivery = await owed(node)
    await node.links.of(WIRE).returned(DEAD, reason="operator")
    for _ in range(3):
        clock.advance(MINUTE)
        assert await node.releaser.tick() == 0

    async with node_of(make_settings(database_url=database_url, federation_activitypub=True), clock) as on:
        assert await on.releaser.tick() == 1
        assert await state_of(on, delivery) is DeliveryState.READY


@pytest.mark.parametrize("state", [DeliveryState.READY, DeliveryState.HELD])
async def test_its_suspects_hold_up_no_others(node: Federation, state: DeliveryState) -> None:
    """Neither those under way, nor those that are more, whose turn would come first."""
    reason = HoldReason.OURS if state is DeliveryState.HELD else None
    theirs = await owed(node, state=state, held_reason=reason, suspect=256)
    suspect = await owed(node, SEALED, wire=DEFAULT_WIRE, held_reason=HoldReason.OURS, suspect=1)
    assert (await node.held_sweeper.sweep())["suspects_released"] == 1
    assert await state_of(node, suspect) is DeliveryState.READY
    assert await state_of(node, theirs) is state


async def test_what_is_newly_held_for_it_brings_no_look(node: Federation, clock: ManualClock) -> None:
    """Nor a write for each of its servers, at each tick."""
    for server, wire in ((DEAD, WIRE), (SEALED, DEFAULT_WIRE)):
        await falls(node, server, wire=wire)
        for _ in range(5):
            await node.links.of(wire).probe_failed(server)
    clock.advance(HEARD_INTERVAL)
    for server, wire in ((DEAD, WIRE), (SEALED, DEFAULT_WIRE)):
        await owed(node, server, wire=wire)
    assert await node.held_sweeper.newly_held() == [(SEALED, DEFAULT_WIRE)]
