"""What others sent: stored once, with a job that has it handled.

Theory of operation. `ReceivedJobs.keep` stores an activity and its job in one transaction. Where the queue lives
elsewhere, the job is added after the commit, and the sweep adds what a crash left without one. What such a job does,
`received_runner` says.

A job is made for a series of five attempts. They count on when an operator has the activity tried again: the next
series has a job of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Executable, bindparam, exists, null, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import Database, ReceivedActivity, ReceivedState
from federation.base.audit import UNRECORDED, Record
from workers import JobSpec, JobState, Queue
from workers.clock import Clock
from workers.jobs import DROP

log = structlog.get_logger(__name__)

HANDLE: Final = "federation.activitypub.received"
"""The name of the jobs, in the queue of tasks."""
ATTEMPTS: Final = 5
PATIENCE: Final = timedelta(minutes=1)
"""What is new for longer is looked for by the sweep."""
PAGE: Final = 500


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


def taken_back(session: Session, activity_id: str, *, actor: str) -> bool:
    """Note that an actor has taken back what he sent: what failed is not to be tried again. Return whether it came."""
    named = {"activity": activity_id, "by": actor}
    session.execute(_TAKEN_BACK, named)
    return session.execute(_COME, named).first() is not None


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
            new = new_among(connection.execute(statement, values))
            record.add(connection, len(new))
            return new

        return len(await self._written(write))

    async def hurry(self, numbers: Iterable[int] | None = None, *, record: Record = UNRECORDED) -> int:
        """Have activities tried now that wait for their next attempt: those with these numbers, or all.

        Return how many there were, which is also put on record. What waits for an older one of its actor is left alone.

        Raises:
            SQLAlchemyError, StorageUnavailable: the database or the queue failed; what was done by then stays.
        """
        statement, values = (_HOLDING, {}) if numbers is None else (_SOME_HOLDING, {"numbers": sorted(set(numbers))})
        hurried = after = 0
        while page := await self._database.rows(statement, {**values, "after": after}):
            await self._queue.start()
            hurried += await self._queue.storage.promote([each.job_id for each in new_among(page)])
            after = page[-1].number
        await self._database.transact(lambda connection: record.add(connection, hurried))
        return hurried

    async def sweep(self) -> Mapping[str, int]:
        """Add the jobs of activities that have none, or whose job has failed: what becomes of them is for their row.

        Give those up whose job somebody cancelled.

        Raises:
            SQLAlchemyError, StorageUnavailable: the database or the queue failed; what was done by then stays.
        """
        added = given_up = after = 0
        before = self._clock.now() - PATIENCE
        await self._queue.start()
        while page := await self._database.rows(_OLDEST, {"before": before, "after": after}):
            waiting = new_among(page)
            known = await self._queue.storage.status([each.job_id for each in waiting])
            without = [each for each, job in zip(waiting, known, strict=True) if job is None]
            await self._queue.enqueue_many([each.job() for each in without])
            jobs = zip(waiting, known, strict=True)
            ended = [(new, job.state) for new, job in jobs if job is not None and job.state.is_final]
            # Its job failed at workers that do not know such jobs, or that disappeared with it and others.
            lost = [new for new, state in ended if state is JobState.FAILED]
            if lost:
                await self._queue.storage.retry([each.job_id for each in lost])
            added += len(without) + len(lost)
            given_up += await self._give_up([new for new, _ in ended if new not in lost])
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
        """Let those fail whose job somebody cancelled."""
        error = "its job was cancelled"
        for each in ended:
            await note(self._database, each, (each.attempts // ATTEMPTS + 1) * ATTEMPTS, error)
            log.error("received_failed", actor=each.actor, error="JobEnded")
        return len(ended)


async def note(database: Database, new: NewActivity, tried: int, error: str) -> None:
    """Note how often an activity was tried; after the last time of a series it has failed."""
    into = ReceivedState.NEW if tried % ATTEMPTS else ReceivedState.FAILED
    values = {"hash": new.activity_hash, "seen": new.attempts, "tried": tried, "into": into, "error": error}
    await database.transact(lambda connection: connection.execute(_NOTED, values))


def new_among(rows: Iterable[Any]) -> list[NewActivity]:
    """Return the activities of rows with `JOB_COLUMNS`."""
    return [NewActivity(activity_hash=row.activity_hash, actor=row.actor, attempts=row.attempts) for row in rows]


TABLE: Final = ReceivedActivity.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core skips the ORM
IS_NEW: Final = TABLE.c.state == ReceivedState.NEW
_OLDER: Final = TABLE.alias("older")
_IS_HIS: Final = (TABLE.c.activity_id == bindparam("activity"), TABLE.c.actor == bindparam("by"))
_COME: Final = select(TABLE.c.number).where(*_IS_HIS).limit(1)
_TAKEN_BACK: Final = (
    update(TABLE).where(*_IS_HIS, TABLE.c.state == ReceivedState.FAILED).values(state=ReceivedState.DONE, text="")
)
JOB_COLUMNS: Final = (TABLE.c.activity_hash, TABLE.c.actor, TABLE.c.attempts)
_HOLDING: Final = (
    select(*JOB_COLUMNS, TABLE.c.number)
    .where(
        IS_NEW,
        TABLE.c.number > bindparam("after"),
        ~exists().where(
            _OLDER.c.state == ReceivedState.NEW, _OLDER.c.actor == TABLE.c.actor, _OLDER.c.number < TABLE.c.number
        ),
    )
    .order_by(TABLE.c.number)
    .limit(PAGE)
)
"""Of each actor the one that holds the others."""
_OLDEST: Final = _HOLDING.where(TABLE.c.received_at < bindparam("before"))
_SOME_HOLDING: Final = _HOLDING.where(TABLE.c.number.in_(bindparam("numbers", expanding=True)))
_NOTED: Final = (
    update(TABLE)
    .where(TABLE.c.activity_hash == bindparam("hash"), IS_NEW, TABLE.c.attempts == bindparam("seen"))
    .values(attempts=bindparam("tried"), state=bindparam("into"), last_error=bindparam("error"))
)
_RETRIED: Final = (
    update(TABLE)
    .where(TABLE.c.state == ReceivedState.FAILED)
    .values(state=ReceivedState.NEW, last_error=null())
    .returning(*JOB_COLUMNS)
)
_SOME_RETRIED: Final = _RETRIED.where(TABLE.c.number.in_(bindparam("numbers", expanding=True)))


@cache
def _new(dialect: str) -> Executable:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(TABLE).on_conflict_do_nothing(index_elements=["activity_hash"]).returning(TABLE.c.number)
