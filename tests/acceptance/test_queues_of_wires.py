"""A wire with a queue of its own, under workers that are killed, and with that queue lost: nothing else is lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from sqlalchemy import func, select, text
from sqlmodel import col

from db import DeliveryJob, new_id
from federation.base.queues.queue import JobQueue
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from tests.acceptance.site import numbered, owe
from tests.acceptance.worker_process import WorkerProcess
from tests.misbehaving import MisbehavingServer, respond
from tests.patience import LONG_PATIENCE_SECONDS, eventually, until
from tests.peer import Peer, acquaint
from tests.plain_wire import PLAIN_JOB, PLAIN_PATH, PlainWire
from workers import JobState

PLAIN_QUEUE = "federation-plain"
DELIVERIES = 150
# What a process of ours is not told by its settings, as no wire is but those of this application.
WITH_THE_WIRE = f"""
from federation.runtime.composition import Federation
from tests.plain_wire import PLAIN_JOB, PlainWire

Federation.__init__.__kwdefaults__.update(
    wires=lambda node: [PlainWire(node.fetch)], own_queues={{PLAIN_JOB: "{PLAIN_QUEUE}"}}
)
"""


@pytest.fixture
def environment(base_environment: dict[str, str], place: dict[str, object], tmp_path: Path) -> dict[str, str]:
    """Settings of a node with leases of a second and attempts to spare, whose processes have the wire."""
    (tmp_path / "sitecustomize.py").write_text(WITH_THE_WIRE)
    return {
        **base_environment,
        "PYTHONPATH": f"{tmp_path}:{base_environment['PYTHONPATH']}",
        "FEDERATION_LEASE": "1s",
        "FEDERATION_DELIVERY_ATTEMPTS": "100",
        "FEDERATION_MAX_STALLS": "100",
        "FEDERATION_DELIVERY_BACKOFF": "100ms",
        "FEDERATION_OUTBOX_INTERVAL": "1s",
        **{name.upper(): str(value) for name, value in place.items()},
    }


@pytest.fixture
async def federation(environment: dict[str, str]) -> AsyncIterator[Federation]:
    settings = Settings.from_values(environment)
    node = Federation(settings, wires=lambda node: [PlainWire(node.fetch)], own_queues={PLAIN_JOB: PLAIN_QUEUE})
    yield node
    await node.close()


@pytest.mark.timeout(600)
async def test_a_wire_with_a_queue_of_its_own_loses_nothing(
    federation: Federation, worker: WorkerProcess, peer: Peer
) -> None:
    """Its worker is killed over it, and all that its queue had goes while it is paused; all by either wire arrives.

    The other queue has its jobs all the while, and its deliveries go out.
    """
    await acquaint(federation, peer)
    queue = federation.delivery_queues.of(PLAIN_JOB)
    async with MisbehavingServer() as server:
        server.default = respond(202)
        owed = await owe_plain(federation, server)
        await worker.start()
        await until(lambda: len(server.requests) > DELIVERIES // 10)
        worker.kill()
        await queue.manage.pause()
        assert await left(federation), "there was nothing left to do when it was killed"

        posts = numbered("post", DELIVERIES)
        await owe(federation, peer, posts)
        await worker.start()
        await until(lambda: len(peer.applied) == DELIVERIES)
        await eventually(lambda: left(federation, unseen=True), lambda number: number == 0)
        assert await left(federation), "the queue was not paused"
        await flush(federation)
        # By name; or, where the worker got no core for a second, by the leases that it lost: then the jobs are there.
        await eventually(lambda: is_noticed(worker, queue), bool, patience=LONG_PATIENCE_SECONDS)

        await queue.manage.resume()
        await eventually(lambda: left(federation), lambda number: number == 0, patience=LONG_PATIENCE_SECONDS)
        assert {json.loads(request.body)["id"] for request in server.requests} == set(owed)
    assert peer.refused == []
    assert worker.terminate() == 0


async def owe_plain(federation: Federation, server: MisbehavingServer) -> list[str]:
    ids = [new_id() for _ in range(DELIVERIES)]
    async with federation.outbox.transaction() as session:
        for each in ids:
            await federation.outbox.enqueue_delivery(
                session, PLAIN_JOB, server.url + PLAIN_PATH, server.url, json.dumps({"id": each})
            )
    return ids


async def is_noticed(worker: WorkerProcess, queue: JobQueue) -> bool:
    """Whether what was lost is known to be lost."""
    return "queue_lost_its_data" in worker.log.read_text() or bool((await queue.storage.counts())[JobState.QUEUED])


async def left(federation: Federation, *, unseen: bool = False) -> int:
    """How many deliveries are owed; with `unseen`, of which no sweep has seen the job."""
    query = select(func.count()).select_from(DeliveryJob)
    if unseen:
        query = query.where(col(DeliveryJob.queued_at).is_(None))
    return int((await federation.database.rows(query))[0][0])


_DELETED = text("DELETE FROM workers_jobs WHERE queue = (SELECT id FROM workers_queues WHERE name = :name)")


async def flush(federation: Federation) -> None:
    """All keys of the queue are gone, or all its jobs."""
    settings = federation.settings
    if settings.redis_url is None:
        async with federation.database.transaction() as session:
            await session.execute(_DELETED, {"name": PLAIN_QUEUE})
        return
    async with redis.asyncio.Redis.from_url(settings.redis_url.get_secret_value()) as client:
        keys = await client.keys(f"{settings.federation_queue_prefix}:{PLAIN_QUEUE}:*")
        assert keys
        await client.unlink(*keys)
