"""Deliveries survive their worker: `kill -9` at random moments, on every queue the application runs on."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sized
from pathlib import Path

import pytest
from sqlalchemy import func, select, update
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob, DeliveryState
from federation.base.settings.settings import Settings
from federation.delivery.error_codes import STALLED
from federation.delivery.ledger.statements import FATAL_ALONE, FIRST_SUSPECTS
from federation.runtime.composition import Federation
from tests.acceptance.site import all_jobs_completed, job_states, numbered, owe
from tests.acceptance.worker_process import WorkerProcess
from tests.misbehaving import hang
from tests.patience import LONG_PATIENCE_SECONDS, eventually, until
from tests.peer import Peer, acquaint
from workers import JobState

ATTEMPTS = 2


@pytest.fixture
def environment(
    base_environment: dict[str, str], queue_settings: dict[str, object], database_file: Path
) -> dict[str, str]:
    """Settings of a node that delivers to loopback, with leases of a second and attempts to spare."""
    return {
        **base_environment,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "FEDERATION_LEASE": "1s",
        "FEDERATION_DELIVERY_ATTEMPTS": "100",
        "FEDERATION_MAX_STALLS": "100",
        "FEDERATION_DELIVERY_BACKOFF": "200ms",
        "FEDERATION_DELIVERY_CONCURRENCY": "20",
        "FEDERATION_PER_SERVER": "20",
        **{name.upper(): str(value) for name, value in queue_settings.items()},
    }


@pytest.mark.spread("queue_settings", always=("sqlite", "bullmq"))
@pytest.mark.timeout(900)
async def test_killed_workers_lose_nothing(
    federation: Federation, worker: WorkerProcess, peer: Peer, full: bool
) -> None:
    """Hundreds of deliveries all arrive although their worker is killed again and again; repeats are the same delivery.

    Each worker lives for some deliveries, so that kills strike at work however fast that goes.
    """
    deliveries, kills = (2_000, 8) if full else (360, 4)
    await acquaint(federation, peer)
    sent = numbered("post", deliveries)
    await owe(federation, peer, sent)
    chance = random.Random(f"{sys.argv}{len(sent)}")
    for _ in range(kills):
        await worker.start()
        await until_as_many(len(peer.arrived) + chance.randrange(deliveries // (kills + 2)), peer.arrived)
        await asyncio.sleep(chance.uniform(0, 0.05))
        worker.kill()
        assert len(peer.applied) < deliveries, "there was nothing left to do when it was killed"
    await worker.start()
    await eventually(lambda: rows_left(federation), lambda rows: rows == 0, patience=LONG_PATIENCE_SECONDS)
    counts = Counter(arrived.activity_id for arrived in peer.arrived)
    assert set(counts) == set(sent)
    assert len(peer.applied) == deliveries
    assert peer.refused == []
    await all_jobs_completed(federation)
    assert worker.terminate() == 0
    assert await job_states(federation) == {JobState.COMPLETED}


@pytest.mark.spread("queue_settings")
@pytest.mark.timeout(600)
async def test_a_delivery_that_always_loses_its_worker_ends(
    environment: dict[str, str], tmp_path: Path, peer: Peer
) -> None:
    """With its attempts used up by dying workers it is held as a suspect; after three more crashes, alone, it fails."""
    environment = {
        **environment,
        "FEDERATION_DELIVERY_ATTEMPTS": str(ATTEMPTS),
        "FEDERATION_LEASE": "500ms",
        "FEDERATION_OUTBOX_INTERVAL": "1s",
    }
    node = Federation(Settings.from_values(environment))
    worker = WorkerProcess(environment, tmp_path)
    peer.server.default = hang()
    try:
        await acquaint(node, peer)
        await owe(node, peer, ["post"])
        for number in range(1, ATTEMPTS + 1):
            await kill_over_attempt(worker, peer, number)
        await worker.start()
        row = await eventually(lambda: only_row(node), lambda found: found.suspect is not None)
        assert row.suspect == FIRST_SUSPECTS
        assert row.error_code == STALLED
        await suspect_is_alone(node)
        await until_as_many(ATTEMPTS + 1, peer.server.requests)
        worker.kill()
        for crash in range(1, FATAL_ALONE):
            await kill_over_attempt(worker, peer, ATTEMPTS + 1 + crash)
        await worker.start()
        row = await eventually(lambda: only_row(node), lambda found: found.state is DeliveryState.FAILED)
        assert (row.error_code, row.outcome) == (STALLED, "permanent")
        assert row.last_error is not None
        assert "its worker disappeared" in row.last_error
        assert row.settled_at is not None
        assert row.job_id is not None
        assert worker.terminate() == 0
        assert len(peer.server.requests) == row.attempts, "it was tried again"
        attempts = await attempts_at(node, row.id)
        assert [attempt.error_code for attempt in attempts] == [STALLED] * row.attempts
        assert await node.delivery_queue.storage.status([row.job_id]) == [None]
    finally:
        worker.kill()
        await node.close()


async def kill_over_attempt(worker: WorkerProcess, peer: Peer, number: int) -> None:
    """A new worker is killed as soon as the peer has had so many requests."""
    await worker.start()
    await until_as_many(number, peer.server.requests)
    worker.kill()


async def suspect_is_alone(federation: Federation) -> None:
    """The only delivery is as far as eight more crashes would bring it: it runs alone from now on."""
    async with federation.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(suspect=1))


async def until_as_many(count: int, items: Sized) -> None:
    await until(lambda: len(items) >= count)


async def rows_left(federation: Federation) -> int:
    async with federation.database.read() as session:
        return (await session.execute(select(func.count()).select_from(DeliveryJob))).scalar_one()


async def only_row(federation: Federation) -> DeliveryJob:
    async with federation.database.read() as session:
        return (await session.execute(select(DeliveryJob))).scalars().one()


async def attempts_at(federation: Federation, delivery_id: str) -> list[DeliveryAttempt]:
    async with federation.database.read() as session:
        query = select(DeliveryAttempt).where(col(DeliveryAttempt.delivery_id) == delivery_id)
        return list((await session.execute(query)).scalars())
