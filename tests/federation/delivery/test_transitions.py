"""The manual's diagram of states, compared with what the code does to the rows of deliveries."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from sqlmodel import col

from db import DeliveryJob, DeliveryState
from federation.admin import blacklist
from federation.admin.deliveries import holds
from federation.admin.deliveries.bulk import BulkDeliveries
from federation.admin.deliveries.deliveries import Selection
from federation.manual import TRANSITIONS, Step
from federation.retention import Purge
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import Site
from tests.misbehaving import respond
from tests.peer import Peer

AGES_AGO = datetime.now(UTC) - timedelta(days=400)

RECORDER = """
CREATE TABLE seen_changes (number INTEGER PRIMARY KEY, source TEXT, target TEXT);
CREATE TRIGGER seen_insert AFTER INSERT ON delivery_jobs
BEGIN INSERT INTO seen_changes (source, target) VALUES (NULL, NEW.state); END;
CREATE TRIGGER seen_update AFTER UPDATE ON delivery_jobs WHEN OLD.state <> NEW.state
BEGIN INSERT INTO seen_changes (source, target) VALUES (OLD.state, NEW.state); END;
CREATE TRIGGER seen_delete AFTER DELETE ON delivery_jobs
BEGIN INSERT INTO seen_changes (source, target) VALUES (OLD.state, NULL); END;
"""


class Recorder:
    """Notes every change of a row's state, whoever makes it, by triggers of the database."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.transitions: dict[tuple[DeliveryState | None, Step], DeliveryState | None] = {}
        with closing(sqlite3.connect(file)) as connection:
            connection.executescript(RECORDER)

    @asynccontextmanager
    async def step(self, step: Step) -> AsyncIterator[None]:
        """What changes in the block is this step's doing, and something does."""
        assert self._taken() == [], f"changed before {step!r}"
        yield
        changes = self._taken()
        assert changes, f"{step!r} changed nothing"
        for source, target in changes:
            assert self.transitions.setdefault((source, step), target) == target

    def _taken(self) -> list[tuple[DeliveryState | None, DeliveryState | None]]:
        with closing(sqlite3.connect(self._file)) as connection, connection:
            rows = connection.execute("DELETE FROM seen_changes RETURNING source, target").fetchall()
        return [(source and DeliveryState(source), target and DeliveryState(target)) for source, target in rows]


async def made_old(node: Federation, *ids: str) -> None:
    """The rows are from long ago, those that are over have been so for as long."""
    async with node.database.transaction() as session:
        chosen = update(DeliveryJob).where(col(DeliveryJob.id).in_(ids))
        await session.execute(chosen.values(created_at=AGES_AGO))
        await session.execute(chosen.where(col(DeliveryJob.settled_at).is_not(None)).values(settled_at=AGES_AGO))


class Scenes:
    """A node, its peer, and the steps of deliveries that are recorded while the code takes them."""

    def __init__(self, site: Site, peer: Peer, recorder: Recorder) -> None:
        self.site, self.node, self.peer, self.recorder = site, site.federation, peer, recorder
        self.bulk = BulkDeliveries(self.node.database, self.node.delivery_queues)

    async def owed(self, step: Step = Step.OWE) -> str:
        async with self.recorder.step(step):
            return await self.site.owe_post(self.peer)

    async def attempted(self, step: Step, delivery: str) -> None:
        """A worker tries it until its job has ended."""
        async with self.recorder.step(step):
            await self.site.ended(delivery)
        await self.site.stop()

    async def failed(self) -> str:
        delivery = await self.owed()
        self.peer.server.upcoming += [respond(410)] * self.node.settings.federation_delivery_attempts
        await self.attempted(Step.FAIL, delivery)
        return delivery

    async def held(self) -> str:
        await self.node.links.hold(self.peer.url)
        return await self.owed(Step.OWE_HELD)

    async def swept(self, step: Step) -> None:
        async with self.recorder.step(step):
            await self.node.held_sweeper.sweep()

    async def expired(self) -> str:
        delivery = await self.held()
        await made_old(self.node, delivery)
        await self.swept(Step.EXPIRE)
        return delivery

    async def dropped(self, step: Step, delivery: str) -> None:
        async with self.recorder.step(step):
            await self.bulk.drop(Selection(ids=(delivery,)))

    async def retried(self, delivery: str) -> None:
        """It is owed again, and given up by the operator."""
        async with self.recorder.step(Step.RETRY):
            await self.bulk.retry(Selection(ids=(delivery,)))
        await self.dropped(Step.CANCEL, delivery)

    async def purged(self, delivery: str) -> None:
        await made_old(self.node, delivery)
        async with self.recorder.step(Step.PURGE):
            await Purge(self.node.database)()


@pytest.fixture
def scenes(site: Site, peer: Peer, database_file: Path) -> Scenes:
    return Scenes(site, peer, Recorder(database_file))


async def test_the_manuals_transitions_are_what_the_code_does(scenes: Scenes) -> None:
    """Neither more nor less: each step is taken in every state in which it is possible, and all changes are seen."""
    await scenes.dropped(Step.CANCEL, await scenes.owed())
    await scenes.attempted(Step.DELIVER, await scenes.owed())
    await scenes.retried(await scenes.failed())
    await scenes.purged(await scenes.failed())

    waiting = await scenes.owed()
    await scenes.node.links.hold(scenes.peer.url)
    await scenes.attempted(Step.HOLD, waiting)
    async with scenes.recorder.step(Step.RELEASE):
        await holds.release_all(scenes.node)
    await scenes.dropped(Step.CANCEL, waiting)

    await scenes.dropped(Step.CANCEL, await scenes.held())
    await scenes.retried(await scenes.expired())
    await scenes.purged(await scenes.expired())
    forbidden = await scenes.held()
    await blacklist.add(scenes.node.database, scenes.peer.url, reason="spam")
    scenes.node.blacklist.recheck()
    await scenes.swept(Step.FORBID)
    await scenes.dropped(Step.PURGE, forbidden)

    assert scenes.recorder.transitions == TRANSITIONS
