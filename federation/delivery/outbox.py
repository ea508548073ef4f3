"""Owing a delivery: a row in the application's own transaction, and a job once that transaction is committed.

Theory of operation. `enqueue_delivery` inserts the row and notes the job, which refers to the row's text and never
carries it. Where the queue lives in the same database, the job is inserted in the same transaction: both or neither.
Elsewhere it is added after the commit, under the row's id, so adding it twice is harmless; a process that dies in
between leaves a row without a job, which the sweeper finds. `enqueue_fanout` does the same for one text and many
servers, in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Final, TypeAlias

import structlog
from sqlalchemy import event, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from db import Database, DeliveryJob, DeliveryPayload, new_id
from federation.base.bull_queue import BullQueue
from federation.base.jobs import FederationDeliveryJob
from federation.protocol.activities import parse_method
from federation.protocol.urls import canonical_origin
from workers import WorkersError
from workers.checks import check_text

log = structlog.get_logger(__name__)

BATCH: Final = 1_000
"""Rows of one statement, jobs of one round trip."""

PlannedJob: TypeAlias = tuple[str, object, dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Jobs of one name to add when `stored` is committed: per delivery its id, target URL and server URL.

    `payload_id` is the text they share, None where each row has its own.
    """

    stored: object
    name: str
    deliveries: Sequence[tuple[str, str, str]]
    payload_id: str | None = None

    def jobs(self) -> Iterator[PlannedJob]:
        for delivery_id, target_url, server_url in self.deliveries:
            yield delivery_job(
                self.name, delivery_id, target_url=target_url, server_url=server_url, payload_id=self.payload_id
            )


def delivery_job(
    name: str, delivery_id: str, *, target_url: str, server_url: str, payload_id: str | None
) -> PlannedJob:
    """The job of a delivery as `BullQueue.add_bulk` takes it; the row has the text if `payload_id` is None."""
    data = FederationDeliveryJob(
        delivery_job_id=delivery_id,
        target_url=target_url,
        server_url=server_url,
        payload="",
        payload_id=payload_id or delivery_id,
    )
    return (name, data.to_wire(), {"jobId": delivery_id})


@dataclass(slots=True)
class _Pending:
    """What one session's transaction will add."""

    planned: list[Planned] = field(default_factory=list)

    def take(self, session: Session) -> list[Planned]:
        """Those whose row is part of the transaction: a savepoint rolled back takes its rows out of the session."""
        planned, self.planned = self.planned, []
        return [each for each in planned if each.stored in session]


_KEY = "federation.outbox"


class Outbox:
    """Deliveries of one application database. `joins`: the queue lives in that database and takes its connection."""

    def __init__(self, database: Database, queue: BullQueue, *, joins: bool) -> None:
        self._database = database
        self._queue = queue
        self._joins = joins
        self._adding: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """The block's writes are committed, and every delivery it enqueued is in the queue.

        If the block raises, neither happens. Jobs the queue does not take after the commit are logged: their rows are
        committed, so they are owed, not lost.
        """
        if self._joins:  # not in the transaction: connecting for the first time writes, and would wait for its lock
            await self._queue.start()
        pending = _Pending()
        async with self._database.transaction() as session:
            session.sync_session.info[_KEY] = pending
            yield session
            planned = pending.take(session.sync_session)
            if self._joins:
                for batch in _batches(planned):
                    await self._queue.add_bulk(batch, connection=session)
        if not self._joins:
            await self._add(planned)

    async def enqueue_delivery(
        self, session: AsyncSession, name: str, target_url: str, server_url: str, payload: str
    ) -> str:
        """A delivery of `payload` to `target_url` is owed from the moment `session` commits; returns its id.

        In a session of `transaction()` the job is certain when that block has ended; in a session of your own it
        follows the commit by itself.

        Raises:
            ValueError: the payload is no activity we deliver, a URL is not acceptable, or the target is not on that
                server.
        """
        check_text("job name", name)
        parse_method(payload)
        server_url = canonical_origin(server_url)
        _check_target(target_url, server_url)
        now = datetime.now(UTC)
        row = DeliveryJob(
            id=new_id(),
            target_url=target_url,
            payload=payload,
            created_at=now,
            job_name=name,
            server_url=server_url,
            queued_at=now if self._joins else None,
        )
        delivery = (row.id, target_url, server_url)
        # Only now: a target URL the job could not carry is refused before anything is written.
        planned = Planned(stored=row, name=name, deliveries=[delivery])
        _check_jobs(planned)
        session.add(row)
        await self._plan(session, planned)
        return row.id

    async def enqueue_fanout(
        self, session: AsyncSession, name: str, path: str, server_urls: Iterable[str], payload: str
    ) -> tuple[str, ...]:
        """A delivery of one `payload` to `path` on every server is owed from the moment `session` commits.

        The text is stored once, and goes with the last of its deliveries. A server named twice, in whatever spelling,
        gets one delivery. Returns their ids in the order of the servers. The jobs come as with `enqueue_delivery`.

        Raises:
            ValueError: the payload is no activity we deliver, the path does not begin with a slash, or a URL is not
                acceptable; says which. Nothing is written then.
        """
        check_text("job name", name)
        parse_method(payload)
        if not path.startswith("/"):
            raise ValueError(f"the path must begin with a slash, not {path[:100]!r}")
        servers = tuple(dict.fromkeys(map(canonical_origin, server_urls)))
        if not servers:
            return ()
        text = DeliveryPayload(id=new_id(), payload=payload, refs=len(servers), created_at=datetime.now(UTC))
        deliveries = [(new_id(), server + path, server) for server in servers]
        _check_target(deliveries[0][1], servers[0])
        planned = Planned(stored=text, name=name, deliveries=deliveries, payload_id=text.id)
        _check_jobs(planned)
        session.add(text)
        await session.flush()
        await self._insert_rows(session, planned, text.created_at)
        await self._plan(session, planned)
        return tuple(delivery_id for delivery_id, _, _ in deliveries)

    async def _insert_rows(self, session: AsyncSession, planned: Planned, now: datetime) -> None:
        """By statements of many rows: objects of the session would cost ten times as much."""
        connection = await session.connection()
        shared = {
            "payload": "",
            "payload_id": planned.payload_id,
            "attempts": 0,
            "created_at": now,
            "job_name": planned.name,
            "queued_at": now if self._joins else None,
        }
        for start in range(0, len(planned.deliveries), BATCH):
            rows = [
                {**shared, "id": delivery_id, "target_url": target_url, "server_url": server_url}
                for delivery_id, target_url, server_url in planned.deliveries[start : start + BATCH]
            ]
            await connection.execute(insert(DeliveryJob), rows)

    async def close(self) -> None:
        """Jobs that follow a commit of somebody else's session are added."""
        await asyncio.gather(*self._adding, return_exceptions=True)

    async def _plan(self, session: AsyncSession, planned: Planned) -> None:
        pending = session.sync_session.info.get(_KEY)
        if pending is not None:
            pending.planned.append(planned)
        elif self._joins:
            for batch in _batches([planned]):
                await self._queue.add_bulk(batch, connection=session)
        else:
            self._follow_commit(session.sync_session).planned.append(planned)

    def _follow_commit(self, session: Session) -> _Pending:
        pending: _Pending = session.info.setdefault(_KEY, _Pending())

        @event.listens_for(session, "after_commit")
        def add(_session: Session) -> None:
            if session.in_nested_transaction():  # a savepoint ended, the transaction goes on
                return
            planned = pending.take(session)
            if planned:
                task = asyncio.get_running_loop().create_task(self._add(planned))
                self._adding.add(task)
                task.add_done_callback(self._adding.discard)

        return pending

    async def _add(self, planned: list[Planned]) -> None:
        missing = sum(len(each.deliveries) for each in planned)
        for batch in _batches(planned):
            try:
                await self._queue.add_bulk(batch)
            except WorkersError as error:
                log.error(
                    "outbox_jobs_not_added",
                    delivery_ids=[options["jobId"] for _, _, options in batch][:20],
                    count=missing,
                    error=type(error).__name__,
                )
                return
            missing -= len(batch)


def _batches(planned: Iterable[Planned]) -> Iterator[list[PlannedJob]]:
    jobs = chain.from_iterable(each.jobs() for each in planned)
    while batch := list(islice(jobs, BATCH)):
        yield batch


def _check_target(target_url: str, server_url: str) -> None:
    if canonical_origin(target_url) != server_url:
        raise ValueError(f"the target URL is not on {server_url}, the server the delivery is for")
    if not target_url.isascii():
        raise ValueError("the target URL must have everything but ASCII percent-encoded")


def _check_jobs(planned: Planned) -> None:
    """Every job can be made: what it cannot carry is refused before anything is written."""
    for _ in planned.jobs():
        pass
