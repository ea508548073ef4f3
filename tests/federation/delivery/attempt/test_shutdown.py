"""A worker that stops with deliveries under way."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from tests.federation.delivery.harness import Site
from tests.misbehaving import Exchange, Received, hang
from tests.patience import PATIENCE_SECONDS, until
from tests.peer import Peer
from workers import JobState

pytestmark = [pytest.mark.usefixtures("queue_settings"), pytest.mark.spread("queue_settings")]


async def test_a_delivery_cut_off_by_a_stop_is_made_again(site: Site, peer: Peer) -> None:
    """It is given back uncounted; the next worker delivers it, and the peer has applied it once."""
    peer.server.upcoming += [peer.after_applying(hang())]
    delivery = await site.owe_follow(peer)
    site.start()
    await until(lambda: peer.arrived)

    await site.stop(skip_grace=True)

    cut_off = await site.fate(delivery)
    assert (cut_off.state, cut_off.job.attempt, cut_off.log) == (JobState.QUEUED, 0, [])
    assert cut_off.row is not None
    assert (cut_off.row.attempts, cut_off.row.settled_at) == (1, None)
    server = await site.server(peer.url)
    assert server is not None
    assert server.is_healthy

    fate = await site.outcome(delivery)
    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 1, None)
    assert (len(peer.applied), peer.replayed) == (1, 1)
    follow = await site.follow()
    assert follow is not None
    assert follow.accepted


async def test_a_delivery_that_ends_within_the_grace_completes(site: Site, peer: Peer) -> None:
    """A stopping worker lets it finish, and claims nothing more."""
    go_on = asyncio.Event()

    async def slow(request: Received, exchange: Exchange) -> None:
        await go_on.wait()
        await peer.server.default(request, exchange)

    peer.server.upcoming += [slow]
    delivery = await site.owe_post(peer)
    site.start(grace=timedelta(seconds=PATIENCE_SECONDS))
    await until(lambda: peer.deliveries)
    stopping = asyncio.create_task(site.stop())
    await asyncio.sleep(0)
    late = await site.owe_post(peer)
    go_on.set()

    await stopping

    fate = await site.fate(delivery)
    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert (await site.fate(late)).state is JobState.QUEUED
    assert len(peer.applied) == 1


async def test_a_stop_frees_every_slot(site: Site, peer: Peer) -> None:
    """Deliveries cut off by a stop leave no turn behind: the same processor delivers them all afterwards."""
    await site.ended(await site.owe_post(peer))  # a server that answered may have three at once
    before = len(peer.deliveries)
    peer.server.upcoming += [hang(), hang(), hang()]
    deliveries = await site.owe_posts(peer, 3)
    await until(lambda: len(peer.deliveries) == before + 3)
    await site.stop(skip_grace=True)

    await site.ended(*deliveries)

    assert len(peer.applied) == 4
