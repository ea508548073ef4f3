"""A node whose queues lie on each storage, with deliveries in all their states."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta

import pytest
from sqlalchemy import select, update
from sqlmodel import col

from db import DeliveryJob, DeliveryPayload
from federation.app import Federation
from federation.base.jobs import POST_JOB
from tests.federation.conftest import MakeSettings
from workers import JobState
from workers.jobs import Claim, ErrorInfo, Failed, Released

PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"p"}}'
PEER = "https://peer.example"
OTHER = "https://other.example"
LEASE = timedelta(minutes=1)


class Desk:
    """A node, and what an administrator would like to know of it."""

    def __init__(self, node: Federation) -> None:
        self.node = node
        self.database = node.database
        self.queue = node.delivery_queue

    async def owe(self, *servers: str, shared: bool = False) -> list[str]:
        """One delivery to each; with `shared` of one text."""
        async with self.node.outbox.transaction() as session:
            if shared:
                return [*await self.node.outbox.enqueue_fanout(session, POST_JOB, "/posts", servers, PAYLOAD)]
            return [
                await self.node.outbox.enqueue_delivery(session, POST_JOB, f"{server}/posts", server, PAYLOAD)
                for server in servers
            ]

    async def fail(self, *ids: str, code: str = "NO_ACK") -> None:
        """The deliveries have failed: their jobs at a worker, their rows in the ledger."""
        for claim in await self.claim(*ids):
            await self.queue.storage.settle([Failed(claim=claim, error=ErrorInfo(type="E", message="no"))])
        for each in ids:
            await self.node.ledger.attempted(each)
            await self.node.ledger.settled(each, outcome="permanent", error="no", code=code)

    async def claim(self, *ids: str) -> Sequence[Claim]:
        """A worker runs these; whatever else it got it gives back."""
        claims = await self.queue.storage.claim("w", leases={"*": LEASE}, limit=1_000)
        await self.queue.storage.settle([Released(claim=each) for each in claims if each.job_id not in ids])
        return [each for each in claims if each.job_id in ids]

    async def rows(self) -> dict[str, DeliveryJob]:
        async with self.database.read() as session:
            return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}

    async def texts(self) -> list[int]:
        """How often each shared text is referred to."""
        async with self.database.read() as session:
            return [*(await session.execute(select(col(DeliveryPayload.refs)))).scalars()]

    async def states(self, *ids: str) -> list[JobState | None]:
        return [job and job.state for job in await self.queue.storage.status(ids)]

    async def backdate(self, delivery_id: str, created_at: datetime) -> None:
        async with self.database.transaction() as session:
            change = update(DeliveryJob).where(col(DeliveryJob.id) == delivery_id).values(created_at=created_at)
            await session.execute(change)

    async def unqueue(self, *ids: str) -> None:
        """Nobody knows of these rows whether they have jobs."""
        async with self.database.transaction() as session:
            await session.execute(update(DeliveryJob).where(col(DeliveryJob.id).in_(ids)).values(queued_at=None))

    async def make_nodes(self, delivery_id: str) -> None:
        """The row looks as a Node producer writes it."""
        nothing = {"job_name": None, "server_url": None, "queued_at": None}
        async with self.database.transaction() as session:
            await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == delivery_id).values(nothing))


@pytest.fixture
async def desk(make_settings: MakeSettings, queue_settings: dict[str, object]) -> AsyncIterator[Desk]:
    node = Federation(make_settings(**queue_settings))
    await node.delivery_queue.start()
    yield Desk(node)
    await node.close()
