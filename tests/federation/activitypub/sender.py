"""What owes activities in a test: an actor with a key, senders, and an outbox with its queue in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from db import ActivityInbox, ActivityKey, BlacklistedServer, Database, DeliveryJob, DeliveryPayload
from federation.activitypub.activities import PUBLIC, WIRE, create, parse
from federation.activitypub.inboxes import gone_among
from federation.activitypub.outbound import AUTO, OrderingKey, Recipient, Senders, Sent
from federation.base.queues.queue import JobQueue, delivery_queue
from federation.base.settings.settings import Settings
from federation.delivery.outbox.outbox import Outbox
from federation.servers.blacklist import Blacklist
from workers import JobState
from workers.clock import ManualClock, SystemClock
from workers.storage.memory import MemoryStorage

OWN: Final = "https://a.example"
ALICE: Final = f"{OWN}/users/alice"
NOW: Final = datetime(2026, 5, 1, tzinfo=UTC)


def note(number: int = 1, *, actor: str = ALICE, **members: object) -> dict[str, Any]:
    """The Create of a note."""
    return create(
        {"id": f"{actor}/notes/{number}", "type": "Note", "attributedTo": actor, "to": [PUBLIC], "content": "s3cret"}
        | members
    )


def follower(name: str = "bob", *, host: str = "b.example", shared: bool = True) -> Recipient:
    base = f"https://{host}"
    return Recipient(
        id=f"{base}/users/{name}",
        inbox=f"{base}/users/{name}/inbox",
        shared_inbox=f"{base}/inbox" if shared else None,
    )


def key_of(actor: str, **values: Any) -> ActivityKey:
    """The row of a key, which signs nothing."""
    made = {"key_id": f"{actor}#main-key", "actor_id": actor, "kind": "rsa", "private": "", "public_pem": ""}
    return ActivityKey(**{**made, "created_at": NOW, "use_from": NOW, **values})


async def add_key(database: Database, actor: str = ALICE, **values: Any) -> None:
    async with database.transaction() as session:
        session.add(key_of(actor, **values))


def checked(_: str, payload: str) -> str:
    """What the wire would check."""
    parse(payload)
    return WIRE


@dataclass(slots=True)
class Sender:
    """The parts of a node that owe activities."""

    database: Database
    clock: ManualClock
    queue: JobQueue
    outbox: Outbox
    blacklist: Blacklist
    allow_http: bool = False
    allowed_hostnames: frozenset[str] = frozenset()

    @classmethod
    def on(cls, database: Database) -> Sender:
        queue, clock = delivery_queue(Settings.from_values({}), MemoryStorage()), ManualClock(SystemClock().now())
        outbox = Outbox(database, queue, check=checked, joins=False, clock=clock)
        return cls(database, clock, queue, outbox, Blacklist(database, check_interval=timedelta(0), clock=clock))

    @property
    def senders(self) -> Senders:
        return Senders(
            own_url=OWN,
            inserter=self.outbox.inserter,
            gone_among=gone_among,
            allow_http=self.allow_http,
            allowed_hostnames=self.allowed_hostnames,
            clock=self.clock,
        )

    async def send(
        self,
        session: AsyncSession,
        activity: Mapping[str, object] | str | bytes,
        *to: Recipient,
        prefer_shared_inbox: bool = True,
        exclude: Iterable[str] = (),
        key: OrderingKey = AUTO,
    ) -> Sent:
        addressed = self.senders.addressed(
            activity, to, prefer_shared_inbox=prefer_shared_inbox, exclude=exclude, key=key
        )
        blacklisted = await self.blacklist.covered({*addressed.servers.values()})

        def work(inside: Session) -> Sent:
            return self.senders.send(inside, addressed, blacklisted=blacklisted, plan=self.outbox.plan)

        return await self.outbox.within(session, work, "activitypub.send")

    async def sent(self, activity: Mapping[str, object] | str | bytes, *to: Recipient, **options: Any) -> Sent:
        """Send it in a transaction of its own."""
        async with self.outbox.transaction() as session:
            return await self.send(session, activity, *to, **options)

    async def rows(self) -> dict[str, DeliveryJob]:
        async with self.database.read() as session:
            return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}

    async def texts(self) -> Sequence[DeliveryPayload]:
        async with self.database.read() as session:
            return (await session.execute(select(DeliveryPayload))).scalars().all()

    async def jobs(self) -> set[str]:
        await self.queue.start()
        return {job.id for job in (await self.queue.storage.list(JobState.QUEUED)).jobs}

    async def blacklist_server(self, rule: str) -> None:
        async with self.database.transaction() as session:
            session.add(BlacklistedServer(server_url=rule, created_at=NOW, reason="spam"))
        self.blacklist.recheck()

    async def lose_inbox(self, url: str, *, since: datetime | None = None) -> None:
        """It answered that it is no more."""
        server_url, gone_at = "/".join(url.split("/")[:3]), since or self.clock.now()
        async with self.database.transaction() as session:
            session.add(ActivityInbox(url=url, server_url=server_url, gone_at=gone_at, gone_code=410))

    async def close(self) -> None:
        await self.blacklist.close()
        await self.outbox.close()
