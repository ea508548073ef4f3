"""Owing a delivery: a row in the application's own transaction, and a job once that transaction is committed.

Theory of operation. `enqueue_delivery` inserts the row and plans the job, which refers to the row's text and never
carries it. Where the queue lives in the same database, the job is inserted in the same transaction: both or neither.
Elsewhere it is added after the commit, under the row's id, so adding it twice is harmless; a process that dies in
between leaves a row without a job, which the sweeper finds. `enqueue_fanout` does the same for one text and many
servers, in batches. The module `insert` writes the rows, for asynchronous and synchronous callers alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from db import Database, new_timed_id
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.outbox.insert import (
    BATCH,
    CheckPayload,
    OutboxInserter,
    Pending,
    Planned,
    batches,
    follow_commit,
    pending_of,
    set_pending,
)
from federation.delivery.rows import READY, OwedRow
from workers.clock import Clock

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Outbox:
    """Deliveries of one application database.

    `check` refuses what could never be delivered. `joins` says that the queues live in that database and use its
    connection.
    """

    def __init__(
        self,
        database: Database,
        queues: DeliveryQueues,
        *,
        check: CheckPayload,
        joins: bool,
        clock: Clock | None = None,
        new_id: Callable[[], str] = new_timed_id,
    ) -> None:
        self._database = database
        self._queues = queues
        self.joins = joins
        self.inserter = OutboxInserter(database.own, queues, check=check, joins=joins, clock=clock, new_id=new_id)
        self._adding: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Commit the block's writes, then add every delivery that it enqueued to the queue.

        If the block raises, neither happens. Jobs that the queue does not accept after the commit are logged: their
        rows are committed, so they are owed, not lost.
        """
        await self._connect()
        pending = Pending()
        async with self._database.transaction() as session:
            set_pending(session.sync_session, pending)
            yield session
            planned = pending.take(session.sync_session)
            if self.joins:
                await session.run_sync(self.inserter.add_jobs, planned)
        if not self.joins:
            await self.add(planned)

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
        """Owe a delivery of `payload` to `target_url` from the moment `session` commits, and return its id.

        In a session of `transaction()` the job is in the queue when that block has ended; in a session of your own it
        follows the commit by itself. While its server is down the delivery is held, and has no job.

        Deliveries with one `ordering_key` to one server arrive in the order in which they were enqueued, each after the
        end of the one before. Older ones of the key that were given up are removed, so that no retry by hand brings
        back what this one replaces.

        Raises:
            ValueError: the payload is no activity that we deliver, a URL is not acceptable, the target is not on that
                server, or the session is on another database. Nothing is written then.
            TypeError: it is no `AsyncSession`; the message names the call that accepts it.
        """

        def owe(inside: Session) -> str:
            planned = self.inserter.delivery(inside, name, target_url, server_url, payload, ordering_key)
            self.plan(inside, planned)
            return planned.owed[0]

        return await self.within(session, owe, "enqueue_delivery")

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
        """Owe a delivery of one `payload` to `path` on every server once `session` commits, and return their ids.

        The text is stored once, and is deleted with the last of its deliveries. A server that is named twice, in
        whatever spelling, gets one delivery. The ids follow the order of the servers. Jobs, held deliveries and
        `ordering_key` work as with `enqueue_delivery`, for each server separately.

        Raises:
            ValueError: the payload is no activity that we deliver, the path does not begin with a slash, or a URL is
                not acceptable; the message says which. Or the session is on another database. Nothing is written then.
            TypeError: it is no `AsyncSession`; the message names the call that accepts it.
        """

        def owe(inside: Session) -> tuple[str, ...]:
            planned = self.inserter.fanout(inside, name, path, server_urls, payload, ordering_key)
            if planned is None:
                return ()
            self.plan(inside, planned)
            return planned.owed

        return await self.within(session, owe, "enqueue_fanout")

    async def within(self, session: AsyncSession, work: Callable[[Session], T], call: str) -> T:
        """Run `work` with the synchronous session inside an asynchronous one, and return its result.

        `call` names the caller.

        Raises:
            TypeError: it is another kind of session.
        """
        self.check_kind(session, call)
        await self._connect()
        if self._database.own.needs_a_look(session.get_bind().engine):
            await asyncio.to_thread(self._database.own.learn)
        return await session.run_sync(work)

    def check_kind(self, session: object, call: str) -> None:
        """Check that the session is an asynchronous one. `call` names the caller.

        Raises:
            TypeError: it is another kind of session.
        """
        if not isinstance(session, AsyncSession):
            raise TypeError(
                f"federation.{call} takes an AsyncSession, not {type(session).__name__}; synchronous sessions and"
                f" connections go to federation.sync.{call}"
            )

    async def add(self, planned: Iterable[Planned]) -> None:
        """Add the jobs, whose rows are committed, to the queue.

        What the queue does not accept is logged, and left to a sweep.
        """
        planned = list(planned)
        missing = sum(len(each.deliveries) for each in planned)
        for batch in batches(planned):
            try:
                await self._queues.add_bulk(batch)
            except Exception as error:  # whatever it is: what is committed must not look as if it had failed
                log.error(
                    "outbox_jobs_not_added",
                    delivery_ids=[options["jobId"] for _, _, options in batch][:20],
                    count=missing,
                    error=type(error).__name__,
                )
                return
            missing -= len(batch)

    async def add_committed(self, ids: Sequence[str]) -> list[str]:
        """Add the jobs of those deliveries that are committed and ready. Return the ids of the others."""
        left = list(ids)
        try:
            for start in range(0, len(ids), BATCH):
                some = ids[start : start + BATCH]
                rows = [OwedRow(**row._mapping) for row in await self._database.rows(READY, {"ids": some})]
                await self._queues.add_bulk([row.job() for row in rows])
                found = {row.id for row in rows}
                left = [each for each in left if each not in found]
        except Exception as error:  # a sweep will find them
            log.error("outbox_jobs_not_added", delivery_ids=left[:20], count=len(left), error=type(error).__name__)
            return []
        return left

    async def close(self) -> None:
        """Wait until jobs that follow a commit of somebody else's session are added."""
        await asyncio.gather(*self._adding, return_exceptions=True)

    async def _connect(self) -> None:
        """Prepare all that a caller's transaction will need, so that it never waits for us with its lock held."""
        if self.joins:
            await self._queues.start()
        else:
            self._queues.check_loop()

    def plan(self, session: Session, planned: Planned) -> None:
        """Add the jobs in the session's transaction, or after its commit."""
        pending = pending_of(session)
        if pending is not None:
            pending.planned.append(planned)
        elif self.joins:
            self.inserter.add_jobs(session, [planned])
        else:
            follow_commit(session, self._add_soon).planned.append(planned)

    def _add_soon(self, planned: list[Planned]) -> None:
        task = asyncio.get_running_loop().create_task(self.add(planned))
        self._adding.add(task)
        task.add_done_callback(self._adding.discard)
