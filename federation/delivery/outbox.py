"""Owing a delivery: a row in the application's own transaction, and a job once that transaction is committed.

Theory of operation. `enqueue_delivery` inserts the row and notes the job, which refers to the row's text and never
carries it. Where the queue lives in the same database, the job is inserted in the same transaction: both or neither.
Elsewhere it is added after the commit, under the row's id, so adding it twice is harmless; a process that dies in
between leaves a row without a job, which the sweeper finds. `enqueue_fanout` does the same for one text and many
servers, in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, islice
from typing import Any, Final, TypeAlias

import structlog
from sqlalchemy import event, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from db import Database, DeliveryJob, DeliveryPayload, DeliveryState, new_id
from federation.base.bull_queue import BullQueue
from federation.delivery.order import Standing, stand
from federation.delivery.rows import PlannedJob, delivery_job
from federation.protocol.activities import parse_method
from federation.protocol.urls import canonical_origin
from workers import WorkersError
from workers.checks import check_text
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

BATCH: Final = 1_000
"""Rows of one statement, jobs of one round trip."""

Delivery: TypeAlias = tuple[str, str, str]
"""Its id, target URL and server URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Jobs of one name to add when `stored` is committed: per delivery its id, target URL and server URL.

    `payload_id` is the text they share, None where each row has its own.
    """

    stored: object
    name: str
    deliveries: Sequence[Delivery]
    payload_id: str | None = None

    def jobs(self) -> Iterator[PlannedJob]:
        for delivery_id, target_url, server_url in self.deliveries:
            yield delivery_job(
                self.name, delivery_id, target_url=target_url, server_url=server_url, payload_id=self.payload_id
            )


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

    def __init__(
        self,
        database: Database,
        queue: BullQueue,
        *,
        joins: bool,
        clock: Clock | None = None,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        self._database = database
        self._queue = queue
        self._joins = joins
        self._new_id = new_id
        self._clock = clock or SystemClock()
        self._adding: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """The block's writes are committed, and every delivery it enqueued is in the queue.

        If the block raises, neither happens. Jobs the queue does not take after the commit are logged: their rows are
        committed, so they are owed, not lost.
        """
        await self._connect()
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
        self,
        session: AsyncSession,
        name: str,
        target_url: str,
        server_url: str,
        payload: str,
        *,
        ordering_key: str | None = None,
    ) -> str:
        """A delivery of `payload` to `target_url` is owed from the moment `session` commits; returns its id.

        In a session of `transaction()` the job is certain when that block has ended; in a session of your own it
        follows the commit by itself. While its server is down the delivery is held, and has no job.

        Deliveries with one `ordering_key` to one server arrive in the order in which they were enqueued, each after the
        end of the one before. Older ones of the key that were given up are removed, so that no retry by hand brings
        back what this one replaces.

        Raises:
            ValueError: the payload is no activity we deliver, a URL is not acceptable, or the target is not on that
                server.
        """
        check_text("job name", name)
        if ordering_key is not None:
            check_text("ordering key", ordering_key)
        parse_method(payload)
        server_url = canonical_origin(server_url)
        _check_target(target_url, server_url)
        delivery = (self._new_id(), target_url, server_url)
        # Only now: a target URL the job could not carry is refused before anything is written.
        _check_jobs(Planned(stored=None, name=name, deliveries=[delivery]))
        await self._connect()
        now = self._clock.now()
        standings = await stand(session, [server_url], ordering_key)
        row = DeliveryJob(
            id=delivery[0],
            target_url=target_url,
            payload=payload,
            created_at=now,
            job_name=name,
            server_url=server_url,
            **self._row_values(delivery, standings, ordering_key, now),
        )
        session.add(row)
        ready = [delivery] if row.state is DeliveryState.READY else []
        await self._plan(session, Planned(stored=row, name=name, deliveries=ready))
        return row.id

    def _row_values(
        self, delivery: Delivery, standings: Mapping[str, Standing], ordering_key: str | None, now: datetime
    ) -> dict[str, Any]:
        standing = standings[delivery[2]]
        held = standing.held is not None
        return {
            "state": DeliveryState.HELD if held else DeliveryState.READY,
            "held_reason": standing.held,
            "held_at": now if held else None,
            "job_id": delivery[0],
            "queued_at": now if self._joins and not held else None,
            "ordering_key": ordering_key,
            "ordering_position": standing.position,
        }

    async def enqueue_fanout(
        self,
        session: AsyncSession,
        name: str,
        path: str,
        server_urls: Iterable[str],
        payload: str,
        *,
        ordering_key: str | None = None,
    ) -> tuple[str, ...]:
        """A delivery of one `payload` to `path` on every server is owed from the moment `session` commits.

        The text is stored once, and goes with the last of its deliveries. A server named twice, in whatever spelling,
        gets one delivery. Returns their ids in the order of the servers. Jobs, held deliveries and `ordering_key`, to
        each server for itself, are as with `enqueue_delivery`.

        Raises:
            ValueError: the payload is no activity we deliver, the path does not begin with a slash, or a URL is not
                acceptable; says which. Nothing is written then.
        """
        check_text("job name", name)
        parse_method(payload)
        if ordering_key is not None:
            check_text("ordering key", ordering_key)
        if not path.startswith("/"):
            raise ValueError(f"the path must begin with a slash, not {path[:100]!r}")
        servers = tuple(dict.fromkeys(map(canonical_origin, server_urls)))
        if not servers:
            return ()
        text = DeliveryPayload(id=self._new_id(), payload=payload, refs=len(servers), created_at=self._clock.now())
        deliveries = [(self._new_id(), server + path, server) for server in servers]
        _check_target(deliveries[0][1], servers[0])
        planned = Planned(stored=text, name=name, deliveries=deliveries, payload_id=text.id)
        _check_jobs(planned)
        await self._connect()
        session.add(text)
        await session.flush()
        ready = await self._insert_rows(session, planned, ordering_key, text.created_at)
        await self._plan(session, replace(planned, deliveries=ready))
        return tuple(delivery_id for delivery_id, _, _ in deliveries)

    async def _insert_rows(
        self, session: AsyncSession, planned: Planned, ordering_key: str | None, now: datetime
    ) -> list[Delivery]:
        """By statements of many rows, as objects of the session would cost ten times as much; those that are ready."""
        connection = await session.connection()
        shared = {
            "payload": "",
            "payload_id": planned.payload_id,
            "attempts": 0,
            "created_at": now,
            "job_name": planned.name,
        }
        ready: list[Delivery] = []
        for start in range(0, len(planned.deliveries), BATCH):
            batch = planned.deliveries[start : start + BATCH]
            standings = await stand(session, [server_url for _, _, server_url in batch], ordering_key)
            ready += [each for each in batch if standings[each[2]].held is None]
            rows = [
                {
                    **shared,
                    **self._row_values(delivery, standings, ordering_key, now),
                    "id": delivery[0],
                    "target_url": delivery[1],
                    "server_url": delivery[2],
                }
                for delivery in batch
            ]
            await connection.execute(insert(DeliveryJob), rows)
        return ready

    async def _connect(self) -> None:
        """A queue in the same database is connected: that writes the first time, and would wait for our own lock."""
        if self._joins:
            await self._queue.start()

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
