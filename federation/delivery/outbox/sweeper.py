"""Ready deliveries whose job is missing: a process died, or the queue was down, or lost its data.

Theory of operation. A ready row has a job, and names it. A sweep reads the rows that are old enough for their job to
have been added, asks the queue for their jobs, and adds the missing ones under the id that the row names, so nothing is
added twice if two processes sweep at the same time. A job that has ended although its row is ready did not decide
anything: a worker of another database ran it, or somebody removed it by hand. Queues remember ended jobs and treat a
repeated id as a duplicate, so such a row gets a new series. So does a row whose job is missing after attempts of the
series, as their numbers are used up. Rows of Node producers name no job until theirs first runs, and are left alone
until then. `queued_at` notes when a job was last known to be there: rows that wait behind a long backlog are looked up
every ten minutes, and not by every sweep. What was noted before this process began is looked up at once: since then the
database may have been replaced by a copy, or the queue by another one. So is everything when the queue seems to have
lost its data, one of several for all: there is no job in it although rows are ready whose jobs lie there, or a worker
has lost its leases in numbers. A job that waits for its next attempt, and longer than any pause lasts, waits for a time
of a clock that was ahead: it is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

import structlog
from sqlalchemy import Connection, bindparam, or_, select, tuple_, update

from db import Database, DeliveryState, among
from federation.base.queues.queue import JobQueue
from federation.delivery.held.sweep_times import Sweeps
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.ledger.attempt_log import stalled_attempt, write_attempts
from federation.delivery.rows import TABLE, OwedRow, series_job_id
from workers import JobState, JobStatus
from workers.clock import Clock, SystemClock
from workers.storage.base import Storage

log = structlog.get_logger(__name__)

MIN_AGE: Final = timedelta(seconds=30)
PAGE: Final = 1_000
MAX_ROWS: Final = 20_000
"""How many rows one sweep looks at."""
ASK_AGAIN: Final = timedelta(minutes=10)
LONGEST_PAUSE: Final = timedelta(hours=1)
"""Clocks of queues and databases differ by less, and so do pauses, unless settings make them longer."""

_OWED: Final = tuple(field.name for field in fields(OwedRow))
_Place: TypeAlias = tuple[datetime, str]
"""Where a row stands among the ready ones: when it was made, and its id."""
_START: Final[_Place] = (datetime.min.replace(tzinfo=UTC), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one sweep saw and did; `complete` means that no row was left to look at."""

    rows: int
    added: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyRow:
    """A row to look at; `attempted` means within its present series."""

    row: OwedRow
    attempted: bool
    place: _Place


class OutboxSweeper:
    """Adds the jobs of deliveries that are ready and have none.

    One process at a time should do so; several do no harm. `longest_pause` is the longest between two
    attempts at a delivery.
    """

    def __init__(
        self,
        database: Database,
        queues: DeliveryQueues,
        *,
        min_age: timedelta = MIN_AGE,
        longest_pause: timedelta = timedelta(0),
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._queues = queues
        self._sweeps = Sweeps(database)
        self._min_age = min_age
        self._longest_pause = longest_pause
        self._clock = clock or SystemClock()
        self._began = self._clock.now()

    async def sweep(self) -> Swept:
        """Add the job of every ready delivery that lacks it, looking at up to 20 000 rows.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue did not answer; the next sweep looks again.
        """
        await self._queues.start()
        now = self._clock.now()
        if await self.lacks_jobs() and await self._sweeps.note_lost_queue(now):
            log.error("queue_lost_its_data", then="the jobs of all ready deliveries are asked for, and added again")
        swept = await self._sweeps.last()
        lost_at = swept.queue_lost_at if swept is not None else None
        # Written by a clock that was ahead, it would have every sweep ask for everything.
        trusted_since = max(self._began, lost_at) if lost_at is not None and lost_at <= now else self._began
        rows = added = 0
        complete, after = False, _START
        while rows < MAX_ROWS and not complete:
            page = await self._page(now, after, trusted_since)
            if page:
                after = page[-1].place
                for queue, some in self._queues.split(page, lambda each: each.row.job_name).items():
                    added += await self._add_missing(queue, some)
                await self._note_queued(page, now)
            rows += len(page)
            complete = len(page) < PAGE
        if added:
            log.warning("outbox_jobs_added", count=added, rows=rows)
        return Swept(rows=rows, added=added, complete=complete)

    async def lacks_jobs(self) -> bool:
        """Tell whether deliveries have been ready for a while, and a queue has no job of any: it lost its data.

        Raises:
            SQLAlchemyError, WorkersError: the database or a queue did not answer.
        """
        values = {"before": self._clock.now() - self._min_age}
        for queue in self._queues.all:
            waiting = _WAITING.where(self._queues.lie_in(queue))
            if await self._database.rows(waiting, values) and not await _has_jobs(queue.storage):
                return True
        return False

    async def _page(self, now: datetime, after: _Place, trusted_since: datetime) -> Sequence[_ReadyRow]:
        values = {
            "made_before": now - self._min_age,
            "asked_before": max(now - ASK_AGAIN, trusted_since),
            "latest": now + ASK_AGAIN,
            "after_made": after[0],
            "after_id": after[1],
            "most": PAGE,
        }
        return [
            _ReadyRow(
                row=OwedRow(**{name: found._mapping[name] for name in _OWED}),
                attempted=found.first_attempted_at is not None,
                place=(found.created_at, found.id),
            )
            for found in await self._database.rows(_READY, values)
        ]

    async def _add_missing(self, queue: JobQueue, page: Sequence[_ReadyRow]) -> int:
        await queue.start()  # one that nobody here works on
        jobs = await queue.storage.status([series_job_id(each.row.id, each.row.series) for each in page])
        looked = list(zip(page, jobs, strict=True))
        over = [each.row for each, job in looked if _has_ended(job) or (job is None and each.attempted)]
        missing = [each.row for each, job in looked if job is None and not each.attempted]
        missing += await self._renewed(over)
        if missing:
            await queue.add_bulk([row.job() for row in missing])
        await self._promote(queue, [(each, job) for each, job in looked if job is not None])
        return len(missing)

    async def _promote(self, queue: JobQueue, looked: Sequence[tuple[_ReadyRow, JobStatus]]) -> None:
        latest = self._clock.now() + max(self._longest_pause, LONGEST_PAUSE)
        # The first job may wait because whoever enqueued it said so, unless it was tried.
        retried = (job for each, job in looked if each.row.series or each.attempted or job.state is JobState.FAILING)
        late = [job.id for job in retried if job.next_run_at is not None and job.next_run_at > latest]
        if late and (count := await queue.storage.promote(late)):
            log.warning("late_attempts_made_due", count=count, why="a clock that was ahead put them off")

    async def _renewed(self, rows: Sequence[OwedRow]) -> list[OwedRow]:
        """Give the rows a new series that are still ready and still name the ended job.

        Return them with the new one.
        """

        def renew(connection: Connection) -> list[OwedRow]:
            stalled = connection.execute(_SENDING, {"rows": [row.id for row in rows]}).all()
            write_attempts(connection, [stalled_attempt(row) for row in stalled])
            return [row for row in rows if connection.execute(_RENEWED, _renewal(row)).rowcount == 1]

        if not rows:
            return []
        renewed = await self._database.transact(renew)
        return [replace(row, series=row.series + 1) for row in renewed]

    async def _note_queued(self, page: Sequence[_ReadyRow], now: datetime) -> None:
        ids = [each.row.id for each in page]
        await self._database.transact(lambda connection: connection.execute(_QUEUED, {"rows": ids, "now": now}))


async def _has_jobs(storage: Storage) -> bool:
    if await storage.waiting_since() is not None:  # the usual answer, which costs nothing
        return True
    counts = await storage.counts()
    return any(number for state, number in counts.items() if not state.is_final)


def _has_ended(job: JobStatus | None) -> bool:
    return job is not None and job.state.is_final


def _renewal(row: OwedRow) -> dict[str, object]:
    return {
        "row": row.id,
        "now_series": row.series,
        "next_series": row.series + 1,
        "job": series_job_id(row.id, row.series + 1),
    }


_WAITING = (
    select(TABLE.c.id)
    .where(
        TABLE.c.state == DeliveryState.READY,
        TABLE.c.settled_at.is_(None),
        TABLE.c.job_name.is_not(None),
        TABLE.c.queued_at < bindparam("before"),
    )
    .limit(1)
)
_READY = (
    select(*(TABLE.c[name] for name in _OWED), TABLE.c.first_attempted_at, TABLE.c.created_at)
    .where(
        TABLE.c.state == DeliveryState.READY,
        TABLE.c.settled_at.is_(None),
        TABLE.c.job_name.is_not(None),
        # Behind the page before, without another walk past all that it had.
        tuple_(TABLE.c.created_at, TABLE.c.id)
        > tuple_(bindparam("after_made", type_=TABLE.c.created_at.type), bindparam("after_id", type_=TABLE.c.id.type)),
        # A time in the future was written before the clock was set back.
        or_(TABLE.c.created_at < bindparam("made_before"), TABLE.c.created_at > bindparam("latest")),
        or_(
            TABLE.c.queued_at.is_(None),
            TABLE.c.queued_at < bindparam("asked_before"),
            TABLE.c.queued_at > bindparam("latest"),
        ),
    )
    .order_by(TABLE.c.created_at, TABLE.c.id)
    .limit(bindparam("most"))
)
_QUEUED = update(TABLE).where(among(TABLE.c.id, "rows")).values(queued_at=bindparam("now"))
_SENDING = select(TABLE).where(among(TABLE.c.id, "rows"), TABLE.c.sending.is_not(None))
_RENEWED = (
    update(TABLE)
    .where(
        TABLE.c.id == bindparam("row"),
        TABLE.c.series == bindparam("now_series"),
        TABLE.c.state == DeliveryState.READY,
        TABLE.c.settled_at.is_(None),
    )
    .values(series=bindparam("next_series"), job_id=bindparam("job"), first_attempted_at=None, sending=None)
)
