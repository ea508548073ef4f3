"""What others sent: stored once, and handled once, of one actor in the order of arrival.

Theory of operation. `ReceivedJobs.keep` stores an activity and its job in one transaction. Where the queue lives
elsewhere, the job is added after the commit, and the sweep adds what a crash left without one.

A job is a hint that its actor has sent something. Whoever runs one handles what is new of that actor, the oldest
first, each in a transaction that begins by marking it as done: of two processes at one activity the second waits for
the first, and then finds nothing to do. A further job of an actor at whom this process is at work only makes it look
once more. So an actor who sends much takes one slot, and a job may end before its own activity is handled.

If a handler raises, the transaction is undone and the attempt counted in the row. From then on only the job of that
very activity tries it, later and later; what the actor sent after it waits, until it is done, or failed after five
attempts. The attempts count on when an operator has it tried again: each five of them are a series, with a job of its
own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, Final, Protocol, TypeAlias

import structlog
from sqlalchemy import Connection, Executable, bindparam, exists, null, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from db import Database, ReceivedActivity, ReceivedState
from federation.activitypub.handlers import Handlers, IncomingActivity, NotTried, call
from federation.base.audit import UNRECORDED, Record
from workers import Job, JobSpec, JobState, Queue, RetryPolicy, Snooze, StorageUnavailable
from workers.clock import Clock
from workers.jobs import DROP

log = structlog.get_logger(__name__)

HANDLE: Final = "federation.activitypub.received"
"""The name of the jobs, in the queue of tasks."""
ATTEMPTS: Final = 5
PATIENCE: Final = timedelta(minutes=1)
"""What is new for longer is looked for by the sweep."""
AWAY: Final = timedelta(seconds=10)
"""How long a job waits for a database that does not answer."""
LIMIT: Final = timedelta(seconds=60)
PAGE: Final = 500
_SHOWN: Final = 500

Begin: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncSession]]
"""Begins a transaction, and adds the jobs of what it owes; see `Outbox.transaction`."""


class OwnHandlers(Protocol):
    """What this node itself does with an activity, before the application."""

    async def prepare(self, activity: IncomingActivity) -> object:
        """Ask others for what the handling needs, before the transaction.

        Raises:
            NotTried: those whom it would ask are busy with questions of ours.
        """

    async def handle(self, session: AsyncSession, activity: IncomingActivity, prepared: object) -> None:
        """Write, in the transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewActivity:
    """An activity that is to be handled, without its text: what its job is made of."""

    activity_hash: str
    actor: str
    attempts: int = 0

    @property
    def is_tried(self) -> bool:
        """Whether it failed before in this series, so that its own job alone tries it again."""
        return self.attempts % ATTEMPTS > 0

    @property
    def job_id(self) -> str:
        """The id of the job of its series."""
        return f"received-{self.activity_hash}.{self.attempts // ATTEMPTS}"

    def job(self, delay: timedelta = timedelta(0)) -> JobSpec:
        """Return the job of its series."""
        return JobSpec(
            payload={"activity": self.activity_hash, "actor": self.actor},
            name=HANDLE,
            id=self.job_id,
            delay=delay,
            keep_completed=DROP,  # it may have left its activity to the job of another
        )


def store(
    connection: Connection,
    *,
    activity_hash: str,
    activity_id: str | None,
    type: str,  # noqa: A002 - as the column
    actor: str,
    text: str,
    now: datetime,
) -> int | None:
    """Store an activity and return its number; None if it is known, which changes nothing."""
    values = {
        "activity_hash": activity_hash,
        "activity_id": activity_id,
        "type": type,
        "actor": actor,
        "received_at": now,
        "state": ReceivedState.NEW,
        "text": text,
        "attempts": 0,
    }
    number: int | None = connection.execute(_new(connection.dialect.name), values).scalar_one_or_none()
    return number


class ReceivedJobs:
    """Stores what arrives, with a job in *queue*. `joins`: the queue lives in the database."""

    def __init__(self, queue: Queue, *, database: Database, joins: bool, clock: Clock) -> None:
        self._queue = queue
        self._database = database
        self._joins = joins
        self._clock = clock

    async def keep(
        self,
        *,
        activity_hash: str,
        activity_id: str | None,
        type: str,  # noqa: A002 - as the column
        actor: str,
        text: str,
    ) -> bool:
        """Store an activity and its job, from the end of this call on. Return False if it is known.

        Raises:
            SQLAlchemyError: the database failed; nothing is stored.
            StorageUnavailable: the same, where the queue lives there.
        """
        now, new = self._clock.now(), NewActivity(activity_hash=activity_hash, actor=actor)

        def write(connection: Connection) -> Sequence[NewActivity]:
            number = store(
                connection,
                activity_hash=activity_hash,
                activity_id=activity_id,
                type=type,
                actor=actor,
                text=text,
                now=now,
            )
            return [] if number is None else [new]

        return bool(await self._written(write))

    async def retry(self, numbers: Iterable[int] | None = None, *, record: Record = UNRECORDED) -> int:
        """Have activities that failed handled again, five times more: those with these numbers, or all.

        Return how many there were, which is also put on record.

        Raises:
            SQLAlchemyError, StorageUnavailable: as for `keep`.
        """
        statement, values = (_RETRIED, {}) if numbers is None else (_SOME_RETRIED, {"numbers": sorted(set(numbers))})

        def write(connection: Connection) -> Sequence[NewActivity]:
            new = _new_among(connection.execute(statement, values))
            record.add(connection, len(new))
            return new

        return len(await self._written(write))

    async def sweep(self) -> Mapping[str, int]:
        """Add the jobs of activities that have none, or were never begun although theirs has failed.

        Give those up whose job has ended otherwise, without a decision.

        Raises:
            SQLAlchemyError, StorageUnavailable: the database or the queue failed; what was done by then stays.
        """
        added = given_up = after = 0
        before = self._clock.now() - PATIENCE
        await self._queue.start()
        while page := await self._database.rows(_OLDEST, {"before": before, "after": after}):
            waiting = _new_among(page)
            known = await self._queue.storage.status([each.job_id for each in waiting])
            without = [each for each, job in zip(waiting, known, strict=True) if job is None]
            await self._queue.enqueue_many([each.job() for each in without])
            pages = zip(page, waiting, known, strict=True)
            ended = [(row, new, job.state) for row, new, job in pages if job is not None and job.state.is_final]
            # Its job failed at a worker that does not know such jobs, or disappeared with another activity.
            lost = [new for row, new, state in ended if state is JobState.FAILED and row.last_error is None]
            if lost:
                await self._queue.storage.retry([each.job_id for each in lost])
            added += len(without) + len(lost)
            given_up += await self._give_up([new for _, new, _ in ended if new not in lost])
            after = page[-1].number
        return {"received_added": added, "received_given_up": given_up}

    async def add(self, new: Sequence[NewActivity], *, delay: timedelta = timedelta(0)) -> None:
        """Add jobs of activities that are stored. What the queue does not accept is logged, and left to the sweep."""
        try:
            await self._queue.enqueue_many([each.job(delay) for each in new])
        except Exception as error:  # whatever it is: what is stored must not look as if it were not
            log.error("received_jobs_not_added", count=len(new), error=type(error).__name__)

    async def _written(self, write: Callable[[Connection], Sequence[NewActivity]]) -> Sequence[NewActivity]:
        """Commit what *write* does, and the jobs of what it returns."""

        def joined(connection: Connection) -> Sequence[NewActivity]:
            new = write(connection)
            if new:
                self._queue.enqueue_on(connection, [each.job() for each in new])
            return new

        if self._joins:
            await self._queue.start()
            return await self._database.transact(joined)
        new = await self._database.transact(write)
        if new:
            await self.add(new)
        return new

    async def _give_up(self, ended: Sequence[NewActivity]) -> int:
        """Let those fail whose worker disappeared with them too often, or whose job somebody cancelled."""
        error = "its job has ended: cancelled, or its worker disappeared too often; look for a crash"
        for each in ended:
            await _note(self._database, each, (each.attempts // ATTEMPTS + 1) * ATTEMPTS, error)
            log.error("received_failed", actor=each.actor, error="JobEnded")
        return len(ended)


class ReceivedRunner:
    """Callable with a job: handles what its actor sent.

    `own` comes before the functions of `handlers`. `begin` begins the transaction of both. `retry` says how long to
    wait after each failure, `limit` how long the handlers may take.
    """

    def __init__(
        self,
        *,
        database: Database,
        begin: Begin,
        jobs: ReceivedJobs,
        own: OwnHandlers,
        handlers: Handlers,
        retry: RetryPolicy | None = None,
        limit: timedelta = LIMIT,
    ) -> None:
        self._database = database
        self._limit = limit
        self._begin = begin
        self._jobs = jobs
        self._own = own
        self._handlers = handlers
        self._retry = retry or RetryPolicy()
        self._busy: set[str] = set()  # actors at whom a job of this process is at work
        self._again: set[str] = set()  # those of them of whom another job has come meanwhile

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
            [new], [row] = _new_among(oldest), oldest
            if new.is_tried and new.activity_hash != own:
                return
            if is_suspect:
                await self._database.transact(partial(_note_begun, number=row.number))
            try:
                await self._handle(row.number, IncomingActivity.of(row.text, actor))
            except NotTried:
                raise
            except Exception as error:
                pause = await self._failed(new, error)
                if pause is None:
                    continue
                if new.activity_hash == own:
                    raise Snooze(pause, reason="a handler raised") from error
                await self._jobs.add([new], delay=pause)
                return

    async def _handle(self, number: int, activity: IncomingActivity) -> None:
        """Call the handlers in one transaction with the end of the activity, unless somebody has ended it by then."""
        functions, is_begun = self._handlers.of(activity.types), False
        try:
            prepared = await self._own.prepare(activity)
            async with self._begin() as session:
                connection = await session.connection()
                done = await connection.execute(_HANDLED if functions else _DONE, {"row": number})
                if done.rowcount == 0:
                    return
                is_begun = True
                async with asyncio.timeout(self._limit.total_seconds()):
                    await self._own.handle(session, activity, prepared)
                    for function in functions:
                        await call(function, session, activity)
        except (SQLAlchemyError, StorageUnavailable) as error:
            if is_begun:
                raise
            raise NotTried(AWAY, reason=f"the database or the queue failed: {type(error).__name__}") from None

    async def _failed(self, new: NewActivity, error: Exception) -> timedelta | None:
        """Count an attempt that failed. Return how long to wait for the next one, None if that was the last."""
        tried = new.attempts + 1
        await _note(self._database, new, tried, _told(error))
        if tried % ATTEMPTS == 0:
            log.error("received_failed", actor=new.actor, error=type(error).__name__)
            return None
        log.warning("received_not_handled", actor=new.actor, attempt=tried % ATTEMPTS, error=type(error).__name__)
        return self._retry.delay(tried % ATTEMPTS)


async def _note(database: Database, new: NewActivity, tried: int, error: str) -> None:
    """Note how often an activity was tried; after the last time of a series it has failed."""
    into = ReceivedState.NEW if tried % ATTEMPTS else ReceivedState.FAILED
    values = {"hash": new.activity_hash, "seen": new.attempts, "tried": tried, "into": into, "error": error}
    await database.transact(lambda connection: connection.execute(_NOTED, values))


def _note_begun(connection: Connection, number: int) -> None:
    connection.execute(_BEGUN, {"row": number})


def _told(error: Exception) -> str:
    """Return the first line of an error, which both databases can store."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return "".join(each if each.isprintable() else " " for each in text[:_SHOWN])


def _new_among(rows: Iterable[Any]) -> list[NewActivity]:
    return [NewActivity(activity_hash=row.activity_hash, actor=row.actor, attempts=row.attempts) for row in rows]


_TABLE: Final = ReceivedActivity.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core skips the ORM
_IS_NEW: Final = _TABLE.c.state == ReceivedState.NEW
_OLDER: Final = _TABLE.alias("older")
_JOB: Final = (_TABLE.c.activity_hash, _TABLE.c.actor, _TABLE.c.attempts)
_OLDEST_OF: Final = (
    select(*_JOB, _TABLE.c.number, _TABLE.c.text)
    .where(_IS_NEW, _TABLE.c.actor == bindparam("actor"))
    .order_by(_TABLE.c.number)
    .limit(1)
)
_OLDEST: Final = (
    select(*_JOB, _TABLE.c.number, _TABLE.c.last_error)
    .where(
        _IS_NEW,
        _TABLE.c.received_at < bindparam("before"),
        _TABLE.c.number > bindparam("after"),
        ~exists().where(
            _OLDER.c.state == ReceivedState.NEW, _OLDER.c.actor == _TABLE.c.actor, _OLDER.c.number < _TABLE.c.number
        ),
    )
    .order_by(_TABLE.c.number)
    .limit(PAGE)
)
"""Of each actor the one that holds the others."""
_DONE: Final = update(_TABLE).where(_TABLE.c.number == bindparam("row"), _IS_NEW).values(state=ReceivedState.DONE)
_HANDLED: Final = _DONE.values(text="")
"""What no function has seen keeps its text: its worker may have imported none."""
_BEGUN: Final = (
    update(_TABLE)
    .where(_TABLE.c.number == bindparam("row"), _IS_NEW, _TABLE.c.last_error.is_(None))
    .values(last_error="a worker disappeared with its actor's job")
)
_NOTED: Final = (
    update(_TABLE)
    .where(_TABLE.c.activity_hash == bindparam("hash"), _IS_NEW, _TABLE.c.attempts == bindparam("seen"))
    .values(attempts=bindparam("tried"), state=bindparam("into"), last_error=bindparam("error"))
)
_RETRIED: Final = (
    update(_TABLE)
    .where(_TABLE.c.state == ReceivedState.FAILED)
    .values(state=ReceivedState.NEW, last_error=null())
    .returning(*_JOB)
)
_SOME_RETRIED: Final = _RETRIED.where(_TABLE.c.number.in_(bindparam("numbers", expanding=True)))


@cache
def _new(dialect: str) -> Executable:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(_TABLE).on_conflict_do_nothing(index_elements=["activity_hash"]).returning(_TABLE.c.number)
