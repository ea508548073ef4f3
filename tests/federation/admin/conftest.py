"""A node whose queues lie on each storage, with deliveries in all their states."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update
from sqlmodel import col

from db import AttemptOutcome, DeliveryJob, DeliveryPayload, DeliveryState, HoldReason
from federation.base.queues.job_data import POST_JOB
from federation.delivery.ledger.entries import Begin, Begun, Ended
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from workers import JobState
from workers.jobs import Claim, ErrorInfo, Failed, Released

PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"p"}}'
PEER = "https://peer.example"
OTHER = "https://other.example"
LEASE = timedelta(minutes=1)


async def end(
    node: Federation,
    delivery_id: str,
    job_id: str,
    *,
    state: DeliveryState,
    reason: HoldReason | None = None,
    code: str = "TIMEOUT",
    error: str = "no",
) -> None:
    """The ledger is told of an attempt by that job, and that it failed."""
    now = datetime.now(UTC)
    begin = Begin(delivery_id=delivery_id, job_id=job_id, job_name=POST_JOB, server_url=PEER, attempt=1, at=now)
    begun = await node.ledger.begin(begin)
    assert isinstance(begun, Begun)
    ended = Ended(
        series=begun.series,
        state=state,
        reason=reason,
        at=now,
        code=code,
        error=error,
        outcome=AttemptOutcome.PERMANENT,
    )
    assert await node.ledger.ended(ended)


class Desk:
    """A node, and what an administrator would like to know of it."""

    def __init__(self, node: Federation) -> None:
        self.node = node
        self.database = node.database
        self.queue = node.delivery_queue

    async def owe(self, *servers: str, shared: bool = False, key: str | None = None) -> list[str]:
        """One delivery to each; with `shared` of one text, with `key` in order."""
        async with self.node.outbox.transaction() as session:
            if shared:
                return [*await self.node.outbox.enqueue_fanout(session, POST_JOB, "/posts", servers, PAYLOAD)]
            return [
                await self.node.outbox.enqueue_delivery(
                    session, POST_JOB, f"{server}/posts", server, PAYLOAD, ordering_key=key
                )
                for server in servers
            ]

    async def fail(self, *ids: str, code: str = "NO_ACK") -> None:
        """The deliveries have failed: their jobs at a worker, their rows in the ledger."""
        await self.attempt(*ids, state=DeliveryState.FAILED, code=code)

    async def hold(self, *ids: str, reason: HoldReason = HoldReason.SERVER) -> None:
        """An attempt at each failed, and they wait now."""
        await self.attempt(*ids, state=DeliveryState.HELD, reason=reason)

    async def attempt(
        self, *ids: str, state: DeliveryState, reason: HoldReason | None = None, code: str = "TIMEOUT"
    ) -> None:
        """A worker tried them in vain."""
        jobs = {row.job_id or row.id: row for row in (await self.rows()).values() if row.id in ids}
        for claim in await self.claim(*jobs):
            await self.queue.storage.settle([Failed(claim=claim, error=ErrorInfo(type="E", message="no"))])
        for job, row in jobs.items():
            await end(self.node, row.id, job, state=state, reason=reason, code=code)

    async def expire(self, *ids: str) -> None:
        """The held deliveries were held until they were too old."""
        expired = {"state": DeliveryState.EXPIRED, "settled_at": datetime.now(UTC), "held_reason": None}
        async with self.database.transaction() as session:
            await session.execute(update(DeliveryJob).where(col(DeliveryJob.id).in_(ids)).values(expired))

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

    async def suspect(self, delivery_id: str, number: int) -> None:
        """The delivery was under way in crashes of workers."""
        async with self.database.transaction() as session:
            await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == delivery_id).values(suspect=number))

    async def make_nodes(self, delivery_id: str) -> None:
        """The row looks as a Node producer writes it."""
        nothing = {"job_name": None, "server_url": None, "queued_at": None, "job_id": None}
        async with self.database.transaction() as session:
            await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == delivery_id).values(nothing))


@pytest.fixture
async def desk(make_settings: MakeSettings, queue_settings: dict[str, object]) -> AsyncIterator[Desk]:
    node = Federation(make_settings(**queue_settings))
    await node.delivery_queue.start()
    yield Desk(node)
    await node.close()
