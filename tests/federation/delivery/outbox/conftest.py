"""An outbox with its database and its queue, on every storage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from db import Database, DeliveryJob, DeliveryPayload
from federation.base.queues.queue import JobQueue
from federation.delivery.outbox.outbox import Outbox
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from workers import JobState

SERVER = "https://b.example"
TARGET = f"{SERVER}/api/auth/social/posts"
PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An outbox, its database and its queue."""

    outbox: Outbox
    database: Database
    queue: JobQueue

    async def enqueue(self, session: AsyncSession, payload: str = PAYLOAD) -> str:
        return await self.outbox.enqueue_delivery(session, "deliver-post", TARGET, SERVER, payload)

    async def rows(self) -> dict[str, DeliveryJob]:
        async with self.database.read() as session:
            return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}

    async def texts(self) -> list[tuple[str, int]]:
        """Shared payloads, each with its number of references."""
        async with self.database.read() as session:
            return [(text.payload, text.refs) for text in (await session.execute(select(DeliveryPayload))).scalars()]

    async def jobs(self) -> set[str]:
        """Ids of the jobs waiting in the queue."""
        await self.queue.start()
        ids: set[str] = set()
        cursor: str | None = None
        while True:
            page = await self.queue.storage.list(JobState.QUEUED, cursor=cursor)
            ids.update(job.id for job in page.jobs)
            if (cursor := page.cursor) is None:
                return ids


@pytest.fixture
async def place(make_settings: MakeSettings, queue_settings: dict[str, object]) -> AsyncIterator[Place]:
    """The queue on each storage: with the rows in one database, or apart from them."""
    federation = Federation(make_settings(**queue_settings))
    yield Place(outbox=federation.outbox, database=federation.database, queue=federation.delivery_queue)
    await federation.close()
