"""Held rows, links and a queue in memory, under a clock that a test moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select, update
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryState, HoldReason, ServerLink, new_id
from federation.base.queues.queue import JobQueue, delivery_queue
from federation.base.settings.settings import Settings
from federation.delivery.held.release import Releaser
from federation.delivery.held.sweeper import HeldSweeper
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.outbox.outbox import Outbox
from federation.sealed.peers.registry import Registry
from federation.servers.blacklist import Blacklist
from federation.servers.links import Links
from tests.federation.delivery.entries import any_activity
from workers import JobState
from workers.clock import ManualClock
from workers.storage.memory import MemoryStorage

URL = "https://b.example"
PATH = "/api/auth/social/posts"
PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{}}'


async def no_check(*_: object) -> None:
    """Nobody looks at a server but the test."""


@dataclass(slots=True)
class Node:
    """What one process has for holding and releasing."""

    database: Database
    clock: ManualClock
    queue: JobQueue
    blacklist: Blacklist
    links: Links
    outbox: Outbox

    @classmethod
    def on(cls, database: Database, clock: ManualClock, *, queue: JobQueue | None = None) -> Node:
        registry = Registry(database, schedule_health_check=no_check)
        queue = queue or delivery_queue(Settings.from_values({}), MemoryStorage())
        return cls(
            database=database,
            clock=clock,
            queue=queue,
            blacklist=Blacklist(database, clock=clock),
            links=Links(database, registry, clock=clock),
            outbox=Outbox(database, DeliveryQueues(queue), check=any_activity, joins=False, clock=clock),
        )

    @property
    def queues(self) -> DeliveryQueues:
        return DeliveryQueues(self.queue)

    def another(self) -> Node:
        """Another process on the same database and queue."""
        return Node.on(self.database, self.clock, queue=self.queue)

    def held(self, *, max_age: timedelta | None = timedelta(days=7)) -> HeldSweeper:
        return HeldSweeper(
            self.database,
            self.queues,
            links=self.links,
            blacklist=self.blacklist,
            max_age=max_age,
            clock=self.clock,
        )

    def releaser(self, *, rate: int = 50, most_waiting: int = 1_000) -> Releaser:
        return Releaser(
            self.database, self.queues, links=self.links, rate=rate, most_waiting=most_waiting, clock=self.clock
        )

    async def close(self) -> None:
        await self.links.close()
        await self.blacklist.close()

    async def add_held(
        self, count: int = 1, *, url: str = URL, reason: HoldReason = HoldReason.SERVER, **values: Any
    ) -> list[str]:
        """Held deliveries, each a second younger than the one before; their ids."""
        now, ids = self.clock.now(), [new_id() for _ in range(count)]
        async with self.database.transaction() as session:
            session.add_all(
                DeliveryJob(
                    **{
                        "id": each,
                        "target_url": url + PATH,
                        "payload": PAYLOAD,
                        "created_at": now - timedelta(seconds=count - number),
                        "job_name": "deliver-post",
                        "server_url": url,
                        "job_id": each,
                        "state": DeliveryState.HELD,
                        "held_reason": reason,
                        "held_at": now,
                        **values,
                    }
                )
                for number, each in enumerate(ids)
            )
        return ids

    async def enqueue(self, *, url: str = URL, key: str | None = None) -> str:
        async with self.outbox.transaction() as session:
            return await self.outbox.enqueue_delivery(
                session, "deliver-post", url + PATH, url, PAYLOAD, ordering_key=key
            )

    async def change(self, ids: Sequence[str], **values: Any) -> None:
        async with self.database.transaction() as session:
            await session.execute(update(DeliveryJob).where(col(DeliveryJob.id).in_(ids)).values(**values))

    async def change_link(self, url: str = URL, **values: Any) -> None:
        async with self.database.transaction() as session:
            await session.execute(update(ServerLink).where(col(ServerLink.server_url) == url).values(**values))
        self.links.forget(url)

    async def rows(self) -> dict[str, DeliveryJob]:
        async with self.database.read() as session:
            return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}

    async def ready(self) -> set[str]:
        return {row.id for row in (await self.rows()).values() if row.state is DeliveryState.READY}

    async def jobs(self) -> set[str]:
        """Ids of the jobs waiting in the queue."""
        await self.queue.start()
        return {job.id for job in (await self.queue.storage.list(JobState.QUEUED)).jobs}

    async def come_up(self, url: str = URL, *, was: str = "TIMEOUT") -> None:
        """The server's link was down, and is up again."""
        await self.links.exhausted(url, was, first_attempted_at=self.clock.now())
        await self.links.returned(url, reason="probe")


class StandsStill(ManualClock):
    """Whoever asks it for the time stands still afterwards for eight days."""

    def now(self) -> datetime:
        now = super().now()
        self.advance(timedelta(days=8))
        return now
