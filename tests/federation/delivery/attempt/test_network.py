"""Servers that are silent, endless, broken or down: bounded, tried again, and their health kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from db import DeliveryState, HoldReason
from federation.delivery.wire import DELIVERY_TIMEOUT
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import Site
from tests.misbehaving import (
    Behaviour,
    Exchange,
    Received,
    bad_chunk,
    close,
    drip_body,
    drip_headers,
    garbage,
    hang,
    huge_body,
    reset,
    reset_mid_body,
    stall_body,
    truncate,
)
from tests.peer import Peer, acquaint
from workers import JobState

DEADLINE = timedelta(seconds=1)
"""Much shorter than a delivery's own, and long enough for an honest answer on a busy machine."""

BROKEN: dict[str, tuple[Behaviour, str]] = {
    "reset": (reset(), "CONN_RESET"),
    "close": (close(), "UNKNOWN"),
    "reset-mid": (reset_mid_body(), "CONN_RESET"),
    "truncate": (truncate(), "CONN_RESET"),
    "bad-chunk": (bad_chunk(), "UNKNOWN"),
    "garbage": (garbage(), "UNKNOWN"),
}
SLOW: dict[str, Behaviour] = {
    "hang": hang(),
    "slow": stall_body(),
    "drip-headers": drip_headers(),
    "drip": drip_body(),
}


@pytest.fixture
async def hasty(federation: Federation, peer: Peer) -> AsyncIterator[Site]:
    """A site whose delivery deadline is short."""
    await acquaint(federation, peer)
    async with Site(federation, timeout=DEADLINE) as running:
        yield running


def held(peer: Peer) -> tuple[asyncio.Event, Behaviour]:
    """An honest answer that waits for the event: a success at once would heal the server before anybody looked."""
    looked = asyncio.Event()

    async def behave(request: Received, exchange: Exchange) -> None:
        await looked.wait()
        await peer.server.default(request, exchange)

    return looked, behave


def test_a_delivery_may_take_15_seconds() -> None:
    """The figure that the manual states; a server that hangs holds a slot for as long."""
    assert DELIVERY_TIMEOUT.total_seconds() == 15


@pytest.mark.parametrize("kind", SLOW)
async def test_no_exchange_outlasts_the_deadline(hasty: Site, peer: Peer, kind: str) -> None:
    """Silence before or within the answer ends at the deadline, is tried again, and leaves the server unhealthy."""
    looked, next_attempt = held(peer)
    peer.server.upcoming += [SLOW[kind], next_attempt]
    delivery = await hasty.owe_post(peer)
    hasty.start()
    await hasty.until(lambda: hasty.failing)

    server = await hasty.server(peer.url)
    assert server is not None
    assert (server.is_healthy, server.unhealthy_reason) == (False, "TIMEOUT")
    assert await hasty.first_probe(peer.url) is not None
    looked.set()
    fate = await hasty.outcome(delivery)
    assert fate.row is None
    assert (fate.state, fate.codes[0], fate.codes[-1]) == (JobState.COMPLETED, "TIMEOUT", None)
    assert DEADLINE.total_seconds() * 1000 <= fate.log[0].duration_ms < DELIVERY_TIMEOUT.total_seconds() * 1000
    assert (fate.log[0].http_status, fate.log[0].response_bytes) == (None, None)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_cap_is_permanent(site: Site, peer: Peer, announced: bool) -> None:
    """An endless answer is cut off at 1 MiB and cannot be an acknowledgment; the row is kept."""
    peer.server.upcoming += [huge_body(announced)]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.FAILED, 1, ["BODY_TOO_LARGE"])
    assert fate.row is not None
    assert (fate.row.outcome, fate.row.last_error, fate.row.attempts) == ("permanent", fate.reason, 1)
    assert "1048576" in fate.reason


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_connection_is_tried_again(site: Site, peer: Peer, kind: str) -> None:
    """The server is unhealthy with the code, a probe of the fixed id is scheduled, and the next attempt heals it."""
    behaviour, code = BROKEN[kind]
    looked, next_attempt = held(peer)
    peer.server.upcoming += [behaviour, next_attempt]
    delivery = await site.owe_post(peer)
    site.start()
    await site.until(lambda: site.failing)

    server = await site.server(peer.url)
    assert server is not None
    assert (server.is_healthy, server.unhealthy_reason, server.health_check_attempts) == (False, code, 0)
    probe = await site.first_probe(peer.url)
    assert probe is not None
    assert (probe.state, probe.name) == (JobState.SCHEDULED, "health-check")

    looked.set()
    fate = await site.outcome(delivery)
    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.COMPLETED, 2, [code, None])
    server = await site.server(peer.url)
    assert server is not None
    assert (server.is_healthy, server.unhealthy_reason) == (True, None)


async def test_a_refused_connection_is_tried_again(site: Site, peer: Peer) -> None:
    """A server that is down costs all attempts of a delivery, which is held and says why."""
    await peer.server.stop()

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.codes) == (None, ["CONN_REFUSED"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason, fate.row.attempts) == (DeliveryState.HELD, HoldReason.SERVER, 5)
    assert "CONN_REFUSED" in (fate.row.last_error or "")
    server = await site.server(peer.url)
    assert server is not None
    assert server.unhealthy_reason == "CONN_REFUSED"


async def test_a_lost_acknowledgment_heals(hasty: Site, peer: Peer) -> None:
    """The peer applied the follow and went silent; the second attempt is its replay, and nothing happened twice."""
    peer.server.upcoming += [peer.after_applying(hang())]

    fate = await hasty.outcome(await hasty.owe_follow(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 2, None)
    assert (len(peer.applied), peer.replayed) == (1, 1)
    follow = await hasty.follow()
    assert follow is not None
    assert follow.accepted
