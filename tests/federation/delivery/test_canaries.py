"""A delivery sent ahead to a server that answers, and what it tells of the server and of itself."""

from __future__ import annotations

import pytest

from db import DeliveryState, HoldReason, LinkState
from tests.federation.delivery.harness import Site
from tests.misbehaving import respond
from tests.peer import Peer
from workers import JobState

UNAVAILABLE = respond(500)


async def held(site: Site, peer: Peer, count: int) -> list[str]:
    """So many posts held for the peer, which answers 500; its link is down, and the oldest is the first."""
    peer.server.default = UNAVAILABLE
    (first,) = await site.owe_posts(peer, 1)
    await site.outcome(first)
    ids = [first, *await site.owe_posts(peer, count - 1)]
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.needs_canary) == (LinkState.DOWN, True)
    return ids


async def test_a_canary_that_gets_through_raises_the_link(site: Site, peer: Peer) -> None:
    """What is held for the server goes out from then on."""
    served = peer.server.default
    first, second = await held(site, peer, 2)
    peer.server.default = served
    assert await site.federation.releaser.send_canary(peer.url)

    fate = await site.outcome(f"{first}.1", row=first)

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.needs_canary) == (LinkState.UP, False)
    assert link.release_at is not None
    row = (await site.fate(second)).row
    assert row is not None
    assert row.state is DeliveryState.HELD


async def test_a_canary_that_fails_is_held_after_one_attempt(site: Site, peer: Peer) -> None:
    """It leaves no job, and the next look is planned."""
    first, _ = await held(site, peer, 2)
    assert await site.federation.releaser.send_canary(peer.url)

    fate = await site.outcome(f"{first}.1", row=first)

    assert fate.state is None
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert [(attempt.series, attempt.attempt) for attempt in fate.log] == [*((0, n) for n in range(1, 6)), (1, 1)]
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.probes) == (LinkState.DOWN, 1)


@pytest.mark.parametrize("status", [500, 502])
async def test_a_delivery_that_alone_fails_is_refused_and_its_server_stays_up(
    site: Site, peer: Peer, status: int
) -> None:
    """It failed as canary while another got through: released again it fails for good, and holds up nobody."""
    served = peer.server.default
    poison, good, last = await held(site, peer, 3)
    releaser, links = site.federation.releaser, site.federation.links
    await releaser.send_canary(peer.url)
    await site.outcome(f"{poison}.1", row=poison)

    peer.server.default = served
    await releaser.send_canary(peer.url)
    assert (await site.outcome(f"{good}.1", row=good)).state is JobState.COMPLETED
    assert (await links.find(peer.url)).state is LinkState.UP

    peer.server.default = respond(status)
    assert await releaser.tick() == 1
    fate = await site.outcome(f"{poison}.2", row=poison)

    assert fate.state is JobState.FAILED
    assert fate.row is not None
    assert (fate.row.state, fate.row.error_code) == (DeliveryState.FAILED, f"HTTP_{status}")
    link = await links.find(peer.url)
    assert (link.state, link.evidence) == (LinkState.UP, 0)
    assert link.release_at is not None
    remaining = (await site.fate(last)).row
    assert remaining is not None
    assert remaining.state is DeliveryState.HELD


async def test_a_canary_to_a_server_that_forgot_us_makes_us_known_again(site: Site, peer: Peer) -> None:
    """It is held after its one attempt, and the next one gets through: no attempt of it would come to be the last."""
    served = peer.server.default
    first, second = await held(site, peer, 2)
    peer.server.default = served
    peer.senders.clear()
    releaser = site.federation.releaser

    await releaser.send_canary(peer.url)
    refused = await site.outcome(f"{first}.1", row=first)
    await releaser.send_canary(peer.url)
    arrived = await site.outcome(f"{second}.1", row=second)

    assert refused.row is not None
    assert (refused.row.state, refused.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert refused.log[-1].remote_code == "UNKNOWN_FEDERATION_SERVER_INTERACTION"
    assert "REGISTER" in peer.discoveries
    assert arrived.row is None


async def test_canaries_that_are_refused_fail_after_as_many_attempts_as_a_job_has(site: Site, peer: Peer) -> None:
    """Those of the series that took the link down count. It stays down: its server answers, and none got through."""
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
