"""Node's workers on the delivery queue, beside ours: with `FEDERATION_JOB_PAYLOAD=inline` they finish our jobs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import delete
from sqlmodel import col

from db import DeliveryJob
from federation.base.queues.job_data import POST_JOB
from federation.base.queues.queue import DELIVERY_QUEUE_NAME
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site, post_payload
from tests.interop.peer import BULLMQ, NodePeer, install_npm_packages, node_peer
from tests.peer import POSTS_PATH, Peer, acquaint
from workers import JobState


@pytest.fixture
async def federation(make_settings: MakeSettings, redis_url: str, queue_prefix: str) -> AsyncIterator[Federation]:
    settings = make_settings(redis_url=redis_url, federation_queue_prefix=queue_prefix, federation_job_payload="inline")
    node = Federation(settings)
    yield node
    await node.close()


@pytest.fixture
async def node(redis_url: str, queue_prefix: str) -> AsyncIterator[NodePeer]:
    install_npm_packages()
    async with node_peer(BULLMQ["5"], redis_url, DELIVERY_QUEUE_NAME, queue_prefix) as peer:
        yield peer


async def test_node_finishes_our_deliveries(federation: Federation, node: NodePeer, peer: Peer) -> None:
    """Its worker has all it needs, the text too; what it delivered, its row deleted, nobody sends again."""
    await acquaint(federation, peer)
    async with Site(federation) as site:
        own = await site.owe_post(peer)
        async with federation.outbox.transaction() as session:
            (shared,) = await federation.outbox.enqueue_fanout(
                session, POST_JOB, POSTS_PATH, [peer.url], post_payload("post-shared")
            )
        runs = {run["id"]: run for run in await node.work(2)}
        assert runs.keys() == {own, shared}
        for job_id, run in runs.items():
            data = run["data"]
            assert (run["name"], data["deliveryJobId"]) == (POST_JOB, job_id)
            assert (data["serverUrl"], data["targetUrl"]) == (peer.url, peer.url + POSTS_PATH)
            assert json.loads(data["payload"])["method"] == "FEDERATE_POST"
        async with federation.database.transaction() as session:  # as Node's worker does at the end of a delivery
            await session.execute(delete(DeliveryJob).where(col(DeliveryJob.id).in_(runs)))
        await federation.outbox_sweeper.sweep()
        jobs = [await federation.delivery_queue.get_status(job_id) for job_id in (own, shared)]
        assert [job.state for job in jobs if job is not None] == [JobState.COMPLETED] * 2
    assert peer.deliveries == []
