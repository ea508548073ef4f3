"""A delivery sent ahead to a server that is away, and what it tells of the server and of itself."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update
from sqlmodel import col

from db import DeliveryJob, DeliveryState, HoldReason, LinkState
from federation.servers.link_rules import MOST_CANARIES
from tests.federation.delivery.harness import Site
from tests.misbehaving import Behaviour, reset, respond
from tests.peer import DISCOVER_PATH, Peer
from workers import JobState

UNAVAILABLE = respond(500)


async def held(site: Site, peer: Peer, count: int) -> list[str]:
    """So many posts held for the peer, which answers 500; its link is down, and the oldest is the first."""
    peer.server.default = UNAVAILABLE
    (first,) = await site.owe_posts(peer, 1)
    await site.outcome(first)
    ids = [first, *await site.owe_posts(peer, count - 1)]
    link = await site.federation.links.find(peer.url)
    assert link.state is LinkState.DOWN
    return ids


async def look(site: Site, peer: Peer) -> None:
    """What a process does once the next look at the peer is due."""
    await site.federation.link_probes.look(await site.federation.links.find(peer.url))


async def test_a_canary_that_gets_through_raises_the_link(site: Site, peer: Peer) -> None:
    """What is held for the server goes out from then on."""
    served = peer.server.default
    first, second = await held(site, peer, 2)
    peer.server.default = served
    assert await site.federation.releaser.send_canary(peer.url)

    fate = await site.outcome(f"{first}.1", row=first)

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.fell_at, link.probes) == (LinkState.UP, None, 0)
    assert link.release_at is not None
    row = (await site.fate(second)).row
    assert row is not None
    assert row.state is DeliveryState.HELD


async def test_a_canary_that_fails_is_held_after_one_attempt(site: Site, peer: Peer) -> None:
    """It leaves no job, and the next look is planned."""
    first, _ = await held(site, peer, 2)
    await look(site, peer)

    fate = await site.outcome(f"{first}.1", row=first)

    assert fate.state is None
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert [(attempt.series, attempt.attempt) for attempt in fate.log] == [*((0, n) for n in range(1, 6)), (1, 1)]
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.probes) == (LinkState.DOWN, 1)


@pytest.mark.parametrize("behaviour", [reset(), respond(500), respond(404, body=b"<p>nothing here</p>")])
async def test_a_server_is_back_by_the_way_that_failed(site: Site, peer: Peer, behaviour: Behaviour) -> None:
    """Its `/discover` is well all the time: the link stays down, whatever it fell by, and each look is one in vain."""
    served = peer.server.default
    peer.server.default = behaviour
    (first,) = await site.owe_posts(peer, 1)
    await site.outcome(first)
    fell = await site.federation.links.find(peer.url)
    asked = len(peer.discoveries)

    for number in (1, 2, 3):
        await look(site, peer)
        await site.outcome(f"{first}.{number}", row=first)
        link = await site.federation.links.find(peer.url)
        assert (link.state, link.since, link.probes) == (LinkState.DOWN, fell.since, number)
    assert len(peer.discoveries) == asked

    peer.server.default = served
    await look(site, peer)
    assert (await site.outcome(f"{first}.4", row=first)).row is None
    assert (await site.federation.links.find(peer.url)).state is LinkState.UP


async def test_a_server_for_which_nothing_is_held_is_asked_for_its_keys(site: Site, peer: Peer) -> None:
    """There is nothing else to see it by."""
    (first,) = await held(site, peer, 1)
    given_up = update(DeliveryJob).where(col(DeliveryJob.id) == first).values(state=DeliveryState.FAILED)
    async with site.federation.database.transaction() as session:
        await session.execute(given_up)
    links, served = site.federation.links, peer.server.routes[DISCOVER_PATH]
    peer.server.routes[DISCOVER_PATH] = respond(503)
    await look(site, peer)
    assert (await links.find(peer.url)).probes == 1

    peer.server.routes[DISCOVER_PATH] = served
    await look(site, peer)
    link = await links.find(peer.url)
    assert (link.state, link.probes) == (LinkState.UP, 1)
    assert link.fell_at is not None  # nothing was acknowledged: if it falls again, that is the same outage
    assert len(peer.deliveries) == 5


async def alone(site: Site, peer: Peer, status: int) -> tuple[str, str]:
    """A delivery that failed as canary before another got through, and another that is still held."""
    served = peer.server.default
    poison, good, last = await held(site, peer, 3)
    await look(site, peer)
    await site.outcome(f"{poison}.1", row=poison)
    peer.server.default = served
    await look(site, peer)
    assert (await site.outcome(f"{good}.1", row=good)).state is JobState.COMPLETED
    assert (await site.federation.links.find(peer.url)).state is LinkState.UP
    peer.server.default = respond(status)
    return poison, last


@pytest.mark.parametrize("status", [500, 502])
async def test_a_delivery_that_alone_fails_waits_by_itself(site: Site, peer: Peer, status: int) -> None:
    """It failed as canary while another got through. Released again it fails, holds up nobody, and waits."""
    poison, last = await alone(site, peer, status)
    assert await site.federation.releaser.tick() == 1
    fate = await site.outcome(f"{poison}.2", row=poison)

    assert fate.state is None
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.ALONE)
    assert (fate.row.error_code, fate.row.alone, fate.row.canary_at) == (f"HTTP_{status}", 1, None)
    assert fate.row.next_attempt_at is not None
    assert fate.row.held_at is not None
    assert abs(fate.row.next_attempt_at - fate.row.held_at - timedelta(minutes=10)) < timedelta(seconds=5)
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.evidence) == (LinkState.UP, 0)
    assert link.release_at is not None
    remaining = (await site.fate(last)).row
    assert remaining is not None
    assert remaining.state is DeliveryState.HELD


@pytest.mark.parametrize(
    ("times", "pause"), [(0, timedelta(minutes=10)), (1, timedelta(hours=1)), (2, timedelta(hours=6)), (3, None)]
)
async def test_each_series_that_is_used_up_alone_waits_longer_and_the_fourth_is_the_last(
    site: Site, peer: Peer, times: int, pause: timedelta | None
) -> None:
    """Another delivery is acknowledged since the first attempt of each."""
    (poison,) = await site.owe_posts(peer, 1)
    async with site.federation.database.transaction() as session:
        await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == poison).values(alone=times))
    served, links = peer.server.default, site.federation.links
    peer.server.default = respond(500)
    site.start()
    await site.until(lambda: site.failing)
    assert (await site.server(peer.url)) is not None
    await links.succeeded(peer.url)

    fate = await site.outcome(poison)

    peer.server.default = served
    assert fate.row is not None
    link = await links.find(peer.url)
    assert link.state is LinkState.UP
    if pause is None:
        assert (fate.row.state, fate.row.error_code) == (DeliveryState.FAILED, "HTTP_500")
        return
    assert (fate.row.state, fate.row.held_reason, fate.row.alone) == (DeliveryState.HELD, HoldReason.ALONE, times + 1)
    assert fate.row.next_attempt_at is not None
    assert abs(fate.row.next_attempt_at - datetime.now(UTC) - pause) < timedelta(minutes=1)


async def test_where_nothing_answered_no_delivery_is_to_blame(site: Site, peer: Peer) -> None:
    """However many others got through meanwhile: it waits for its server."""
    (first,) = await site.owe_posts(peer, 1)
    peer.server.default = reset()
    site.start()
    await site.until(lambda: site.failing)
    await site.federation.links.succeeded(peer.url)

    row = (await site.outcome(first)).row

    assert row is not None
    assert (row.state, row.held_reason, row.alone) == (DeliveryState.HELD, HoldReason.SERVER, 0)


async def test_a_canary_to_a_server_that_forgot_us_makes_us_known_again(site: Site, peer: Peer) -> None:
    """It is held after its one attempt, and the next one gets through: no attempt of it would come to be the last."""
    served = peer.server.default
    first, second = await held(site, peer, 2)
    peer.server.default = served
    peer.senders.clear()

    await look(site, peer)
    refused = await site.outcome(f"{first}.1", row=first)
    await look(site, peer)
    arrived = await site.outcome(f"{second}.1", row=second)

    assert refused.row is not None
    assert (refused.row.state, refused.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert refused.log[-1].remote_code == "UNKNOWN_FEDERATION_SERVER_INTERACTION"
    assert "REGISTER" in peer.discoveries
    assert arrived.row is None


async def test_a_canary_that_is_refused_for_itself_takes_its_own_fate_and_the_next_goes_at_once(
    site: Site, peer: Peer
) -> None:
    """Its server is there, and of the others nothing is known: ten of them make a look, and the link stays down."""
    ids = await held(site, peer, MOST_CANARIES + 1)
    peer.server.default = respond(404)
    links = site.federation.links
    before = await links.find(peer.url)

    for number, delivery in enumerate(ids[:MOST_CANARIES], 1):
        await look(site, peer)
        row = (await site.outcome(f"{delivery}.1", row=delivery)).row
        assert row is not None
        # The first has used up its attempts before; the others had only this one.
        assert row.state is (DeliveryState.FAILED if number == 1 else DeliveryState.HELD)
        link = await links.find(peer.url)
        assert replace(link, canaries=0, rejections=0, probed_at=None, next_probe_at=None, probes=0) == replace(
            before, probed_at=None, next_probe_at=None
        )
        is_last = number == MOST_CANARIES
        assert (link.canaries, link.probes) == ((0, 1) if is_last else (number, 0))
        assert link.next_probe_at is not None
        assert (link.next_probe_at > datetime.now(UTC)) is is_last


async def test_a_refused_canary_fails_after_as_many_attempts_as_a_job_has(site: Site, peer: Peer) -> None:
    """Those of all series count, as no job of a canary ever has a second attempt."""
    first, second = await held(site, peer, 2)
    peer.server.default = respond(404)
    releaser, attempts = site.federation.releaser, site.federation.settings.federation_delivery_attempts

    await releaser.send_canary(peer.url)
    refused = await site.outcome(f"{first}.1", row=first)

    assert refused.row is not None
    assert (refused.row.state, refused.row.error_code, refused.row.attempts) == (
        DeliveryState.FAILED,
        "HTTP_404",
        attempts + 1,
    )
    states = []
    for series in range(1, attempts + 1):
        await releaser.send_canary(peer.url)
        row = (await site.outcome(f"{second}.{series}", row=second)).row
        assert row is not None
        states.append(row.state)
    assert states == [DeliveryState.HELD] * (attempts - 1) + [DeliveryState.FAILED]
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.rejections) == (LinkState.DOWN, 2)


async def test_a_canary_that_is_asked_to_wait_waits_with_the_look(site: Site, peer: Peer) -> None:
    """It stays with the others that are held, so that the next look may send it, and that comes after the pause."""
    first, _ = await held(site, peer, 2)
    peer.server.default = respond(429, {"Retry-After": "600"})
    await look(site, peer)

    row = (await site.outcome(f"{first}.1", row=first)).row

    assert row is not None
    assert (row.state, row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.probes, link.next_probe_at) == (LinkState.DOWN, 0, link.rest_until)
    assert link.rest_until is not None
    assert link.rest_until > datetime.now(UTC) + timedelta(minutes=9)
