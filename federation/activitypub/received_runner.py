"""Handles what others sent: calls the application's functions once, of one actor in the order of arrival.

Theory of operation. A job is a hint that its actor has sent something. Whoever runs one handles what is new of that
actor, the oldest first, each in a transaction that begins by marking it as done: of two processes at one activity the
second waits for the first, and then finds nothing to do. A further job of an actor at whom this process is at work only
makes it look once more. So an actor who sends much takes one slot, and a job may end before its own activity is
handled.

If a handler raises, the transaction is undone and the attempt counted in the row. From then on only the job of that
very activity tries it, later and later; what the actor sent after it waits, until it is done, or failed after five
attempts.

A worker may disappear amid several activities, of which one is to blame. What it was at is handled alone from then on,
with a mark in its row while it is: who finds that mark counts an attempt, as if a handler had raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final, Protocol, TypeAlias

import structlog
from sqlalchemy import Row, bindparam, select, update
from sqlalchemy.exc import DataError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from db import Database, ReceivedState
from federation.activitypub.handlers import Handlers, IncomingActivity, NotTried, call
from federation.activitypub.received import (
    ATTEMPTS,
    IS_NEW,
    JOB_COLUMNS,
    TABLE,
    NewActivity,
    ReceivedJobs,
    new_among,
    note,
)
from federation.activitypub.remote_actors import ActorUnavailable
from federation.activitypub.time_limit import Blocked, time_limit
from federation.base.logs import crash
from federation.base.meter import NO_METER, Meter
from federation.http.errors import NetworkError
from workers import Job, RetryPolicy, Snooze, StorageUnavailable
from workers.clock import Clock

log = structlog.get_logger(__name__)

AWAY: Final = timedelta(seconds=10)
"""How long a job waits for a database that does not answer."""
OF_OTHERS: Final = RetryPolicy(initial=timedelta(seconds=15), multiplier=3, maximum=timedelta(minutes=10))
"""How long an activity waits for a server that has to be asked first: 10 min in all, in which that may restart. What
the actor sends meanwhile waits as long, which the doctor does not call late."""
LIMIT: Final = timedelta(seconds=60)
_SHOWN: Final = 500

ALONE: Final = "handled alone, as a worker had disappeared, since "
AT_MOST: Final = timedelta(seconds=90)
"""How long somebody may still be at what he marked: `LIMIT`, and what is asked before."""

Begin: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncSession]]
"""Begins a transaction, and adds the jobs of what it owes; see `Outbox.transaction`."""


class OwnHandlers(Protocol):
    """What this node itself does with an activity, before the application."""

    async def prepare(self, activity: IncomingActivity) -> object:
        """Ask others for what the handling needs, before the transaction.

        Raises:
            NotTried: those whom it would ask are busy with questions of ours.
            ActorUnavailable, NetworkError: they do not answer now.
        """

    def is_for(self, activity: IncomingActivity) -> bool:
        """Tell whether nobody needs the activity's text once it is handled, though no function is for it."""

    async def handle(self, session: AsyncSession, activity: IncomingActivity, prepared: object) -> bool:
        """Write, in the transaction. Return whether the activity counts, so that the application is told of it."""


class ReceivedRunner:
    """Callable with a job: handles what its actor sent.

    `own` comes before the functions of `handlers`. `begin` begins the transaction of both. `retry` says how long to
    wait after each failure, `of_others` after one of a server that was asked, `limit` how long the handlers may take.
    """

    def __init__(
        self,
        *,
        database: Database,
        begin: Begin,
        jobs: ReceivedJobs,
        own: OwnHandlers,
        handlers: Handlers,
        clock: Clock,
        retry: RetryPolicy | None = None,
        of_others: RetryPolicy = OF_OTHERS,
        limit: timedelta = LIMIT,
        meter: Meter = NO_METER,
    ) -> None:
        self._database = database
        self._limit = limit
        self._begin = begin
        self._clock = clock
        self._jobs = jobs
        self._own = own
        self._handlers = handlers
        self._retry = retry or RetryPolicy()
        self._of_others = of_others
        self._meter = meter
        self._busy: set[str] = set()  # actors at whom a job of this process is at work
        self._again: set[str] = set()  # those of them of whom another job has come meanwhile
        self._company = _Company()

    async def __call__(self, job: Job) -> None:
        """Handle what is new of the job's actor, but for what comes after an activity that waits to be tried again.

        Raises:
            Snooze: the job's own activity is to be tried again, or the database is away.
        """
        payload: Any = job.payload
        actor, own = payload["actor"], payload["activity"]
        if actor in self._busy:
            self._again.add(actor)
            return
        self._busy.add(actor)
        try:
            await self._work_off(actor, own, is_suspect=job.attempt > 1)
        except SQLAlchemyError as error:
            raise Snooze(AWAY, reason=f"the database failed: {type(error).__name__}") from None
        finally:
            self._busy.discard(actor)
            self._again.discard(actor)

    async def _work_off(self, actor: str, own: str, *, is_suspect: bool) -> None:
        """Handle one after the other. `is_suspect`: a worker has disappeared with this job, maybe amid one of them."""
        while True:
            self._again.discard(actor)
            oldest = await self._database.rows(_OLDEST_OF, {"actor": actor})
            if not oldest:
                if actor in self._again:
                    continue
                return
            [new], [row] = new_among(oldest), oldest
            if new.is_tried and new.activity_hash != own:
                return
            try:
                await self._try(row, IncomingActivity.of(row.text, actor), is_suspect=is_suspect)
            except NotTried:
                raise
            except Exception as error:
                pause = await self._failed(new, error)
                if pause is None:
                    continue
                if new.activity_hash == own:
                    raise Snooze(pause, reason="it could not be handled") from error
                await self._jobs.add([new], delay=pause)
                return

    async def _try(self, row: Row[*tuple[Any, ...]], activity: IncomingActivity, *, is_suspect: bool) -> None:
        """Handle it beside others, or alone, with a mark in its row that stays if the process disappears.

        Raises:
            WorkerDisappeared: one has left that mark.
            NotTried, Exception: as the handlers; whoever left the mark may still be at it.
        """
        began = _alone_since(row.last_error)
        if began is not None and abs(self._clock.now() - began) < AT_MOST:
            raise NotTried(AWAY, reason="a process handles it, or disappeared just now")
        if began is not None:
            raise WorkerDisappeared
        if not is_suspect and row.last_error != _DISAPPEARED:
            async with self._company.joined():
                await self._handle(row.number, activity)
            return
        async with self._company.alone():
            await self._mark(row.number, ALONE + self._clock.now().isoformat())
            try:
                await self._handle(row.number, activity)
            except (NotTried, asyncio.CancelledError):
                await self._mark(row.number, row.last_error)
                raise

    async def _mark(self, number: int, told: str | None) -> None:
        await self._database.transact(lambda it: it.execute(_MARKED, {"row": number, "told": told}))

    async def _handle(self, number: int, activity: IncomingActivity) -> None:
        """Call the handlers in one transaction with the end of the activity, unless somebody has ended it by then."""
        functions, is_begun = self._handlers.of(activity.types), False
        try:
            prepared = await self._own.prepare(activity)
            async with self._begin() as session:
                connection = await session.connection()
                is_needed = not functions and not self._own.is_for(activity)
                done = await connection.execute(_DONE if is_needed else _HANDLED, {"row": number})
                if done.rowcount == 0:
                    return
                is_begun = True
                try:
                    async with time_limit(self._limit):
                        counts = await self._own.handle(session, activity, prepared)
                        for function in functions if counts else ():
                            await call(function, session, activity)
                except Blocked:
                    await connection.invalidate()
                    raise
            self._meter.activity_handled("done")
        except (SQLAlchemyError, StorageUnavailable) as error:
            if is_begun or isinstance(error, DataError):  # the latter is the sender's: it will not pass
                raise
            raise NotTried(AWAY, reason=f"the database or the queue failed: {type(error).__name__}") from None

    async def _failed(self, new: NewActivity, error: Exception) -> timedelta | None:
        """Count an attempt that failed. Return how long to wait for the next one, None if that was the last."""
        tried = new.attempts + 1
        await note(self._database, new, tried, told_of(error))
        if tried % ATTEMPTS == 0:
            self._meter.activity_handled("failed")
            log.error("received_failed", actor=new.actor, error=type(error).__name__, stack=crash(error)["stack"])
            return None
        self._meter.activity_handled("retried")
        log.warning(
            "received_not_handled",
            actor=new.actor,
            attempt=tried % ATTEMPTS,
            error=type(error).__name__,
            stack=crash(error)["stack"],
        )
        policy = self._of_others if isinstance(error, ActorUnavailable | NetworkError) else self._retry
        return policy.delay(tried % ATTEMPTS)


class _Company:
    """The activities that are handled at the same moment: many, or one that is alone."""

    def __init__(self) -> None:
        self._members = 0
        self._door = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Be one of many, as soon as nobody is alone, or waits to be."""
        async with self._door:
            self._members += 1
        try:
            yield
        finally:
            self._members -= 1
            self._left.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Be alone, as soon as those are gone who are there."""
        async with self._door:
            while self._members:
                self._left.clear()
                await self._left.wait()
            yield


class WorkerDisappeared(Exception):
    """A process did, while it handled this and nothing else, or could not say how that ended."""

    def __str__(self) -> str:
        return "its process, or the database, disappeared while it handled nothing else"


def _alone_since(told: str | None) -> datetime | None:
    """Return when somebody left a mark, if he did."""
    return datetime.fromisoformat(told.removeprefix(ALONE)) if told is not None and told.startswith(ALONE) else None


def told_of(error: BaseException) -> str:
    """Return the first line of an error, which both databases can store."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return "".join(each if each.isprintable() else " " for each in text[:_SHOWN])


_OLDEST_OF: Final = (
    select(*JOB_COLUMNS, TABLE.c.number, TABLE.c.text, TABLE.c.last_error)
    .where(IS_NEW, TABLE.c.actor == bindparam("actor"))
    .order_by(TABLE.c.number)
    .limit(1)
)
_DONE: Final = update(TABLE).where(TABLE.c.number == bindparam("row"), IS_NEW).values(state=ReceivedState.DONE)
_HANDLED: Final = _DONE.values(text="")
"""What no function has seen keeps its text: its worker may have imported none."""
_MARKED: Final = update(TABLE).where(TABLE.c.number == bindparam("row"), IS_NEW).values(last_error=bindparam("told"))
_DISAPPEARED: Final = told_of(WorkerDisappeared())
