"""Retrying deliveries that were given up, and giving deliveries up: a million of them, in batches.

Theory of operation. Both walk over the existing rows, each once, a batch at a time: no transaction is long, what is
done stays done if the command is stopped, and repeating it does the rest. They go by id, and on SQLite in the order of
the file, because ids are random, and a batch of them would touch as many pages as rows. Rows of one ordering key are
changed together, whichever of them a batch meets first. Jobs may live elsewhere than rows, so the order of steps makes
every interruption harmless.

`retry` makes the rows ready for a new series of attempts, then adds their jobs. These have ids of their own, so it does
not matter what the queue remembers of earlier ones. Between the two steps a row is ready and without a job, which is
just what the outbox sweeper looks for. No attempt can be under way, because no job may act for a row that is not ready.
If a younger row of the same ordering key is owed, a row is left alone: sent now, it would undo what the younger one
does. If an older one is owed, the row waits behind it.

`drop` removes the job that the row names, then the row. If a worker is running the job, both stay: the delivery may be
arriving at this moment, and what the attempt reports must find its row. Which jobs are running is asked before and
after the removal, so that a job which ends in between is not taken for one that never began. A row that names another
job by then has moved on, and stays as well. Only the sweeper could still add a job, as it does for any ready row. So
jobs of ready rows that refer to a shared text are removed once more, because that text does not go with one row. Any
other job finds its text gone, and completes without sending. The transaction that removes a row makes the next of its
ordering key ready, as the ledger's transactions do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Connection,
    Row,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    delete,
    func,
    literal,
    literal_column,
    or_,
    select,
    update,
)
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryState, HoldReason
from federation.admin.deliveries.deliveries import Selection, count, is_in
from federation.base.audit import Order, Record, recorded
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.ledger.attempt_log import ATTEMPT_UNDER_WAY, stalled_attempt, write_attempts
from federation.delivery.outbox.ordering import lock_keys
from federation.delivery.rows import OPEN_STATES, TABLE, OwedRow, next_in_order, places_of, release
from workers import JobState

BATCH: Final = 5_000
RUNNING_PAGE: Final = 1_000
JOBS_AT_ONCE: Final = 1_000
"""How many jobs are added in one round trip: a statement of several thousand is slower."""
KEYS_AT_ONCE: Final = 200
"""How many ordering keys one transaction locks: PostgreSQL has room for a few thousand locks in all."""

Progress = Callable[[int], None]
"""Called with the number of further rows that have been dealt with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """How many deliveries are owed again.

    `left` were left alone, because a Node producer wrote them and has their jobs. So were `out_of_order`, because a
    younger delivery of their ordering key is owed, or an older one comes first.
    """

    retried: int
    left: int
    out_of_order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """How many deliveries were given up. `busy` ones were left as they are, because an attempt is under way."""

    dropped: int
    busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """An action that began before, perhaps in a process that died: since when, and its row in the audit log.

    It does not touch what has come since, nor again what it has retried and what was given up, or held, once more.
    """

    since: datetime
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Rows by the jobs that they name, and ordering keys, all selected rows of which are in the batch."""

    jobs: Mapping[str, str]
    keys: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """Rows that are ready again, how many wait behind them, and which were left alone."""

    ready: list[OwedRow] = field(default_factory=list)
    waiting: int = 0
    out_of_order: set[str] = field(default_factory=set)

    def with_those_of(self, more: _Again) -> _Again:
        return _Again(
            ready=self.ready + more.ready,
            waiting=self.waiting + more.waiting,
            out_of_order=self.out_of_order | more.out_of_order,
        )


def _unwatched(_rows: int) -> None:
    pass


def _is_among(column: ColumnElement[str], values: Sequence[str], dialect: str) -> ColumnElement[bool]:
    """Return the same condition as `IN`, with all values in one parameter.

    A statement with thousands of parameters takes longer to write than to run.
    """
    if dialect == "postgresql":
        return column == any_(literal(list(values), ARRAY(Text)))
    listed = func.json_each(json.dumps(list(values))).table_valued("value")
    return column.in_(select(listed.c.value))


class BulkDeliveries:
    """Changes many deliveries of one node."""

    def __init__(self, database: Database, queues: DeliveryQueues, *, batch: int = BATCH) -> None:
        self._database = database
        self._queues = queues
        self._batch = batch

    async def retry(
        self,
        selection: Selection,
        *,
        progress: Progress = _unwatched,
        order: Order | None = None,
        under_way: UnderWay | None = None,
    ) -> Retried:
        """Make every selected delivery that was given up owed again, with new attempts, and add its job to the queue.

        Failed and expired ones are retried; held ones only if the selection names that state, or ids.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue failed; repeating it does the rest.
        """
        chosen = [*selection.conditions(), retryable(selection), *_untouched_since(under_way)]
        unnamed = col(DeliveryJob.job_name).is_(None)
        named = [*chosen, ~unnamed]
        retried = 0
        out_of_order: set[str] = set()

        async def retry_batch(batch: _Batch) -> None:
            nonlocal retried, out_of_order
            done = await self._retry(batch, named, record)
            retried += len(done.ready) + done.waiting
            out_of_order |= done.out_of_order
            progress(len(batch.jobs))

        async with _recorded(self._database, order, under_way) as record:
            await self._each_batch(named, retry_batch, under_way)
        left = await count(self._database, [*chosen, unnamed])
        return Retried(retried=retried, left=left, out_of_order=len(out_of_order))

    async def drop(
        self,
        selection: Selection,
        *,
        progress: Progress = _unwatched,
        order: Order | None = None,
        under_way: UnderWay | None = None,
    ) -> Dropped:
        """Give up the selected deliveries: delete row, text and job, except for those that a worker is just trying.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue failed; repeating it does the rest.
        """
        conditions = selection.conditions()
        dropped = busy = 0

        async def drop_batch(batch: _Batch) -> None:
            nonlocal dropped, busy
            before = await self._running()
            await self._queues.remove([*batch.jobs])
            running = before | await self._running()
            idle = {job: row for job, row in batch.jobs.items() if job not in running}
            gone = await self._delete_rows(idle, conditions, record)
            moved_on = [row for row in idle.values() if row not in gone]
            dropped += len(gone)
            busy += len(batch.jobs) - len(idle)
            busy += await self._count_left(moved_on, conditions) if moved_on else 0
            progress(len(batch.jobs))

        async with _recorded(self._database, order, under_way) as record:
            await self._each_batch(conditions, drop_batch, under_way)
        return Dropped(dropped=dropped, busy=busy)

    async def _each_batch(
        self,
        conditions: Sequence[ColumnElement[bool]],
        change: Callable[[_Batch], Awaitable[None]],
        under_way: UnderWay | None,
    ) -> None:
        await self._queues.start()
        began = datetime.now(UTC) if under_way is None else under_way.since
        wanted = [col(DeliveryJob.created_at) <= began, *conditions]
        last: object = None
        while True:
            async with self._database.read() as session:
                dialect = session.get_bind().dialect.name
                place: ColumnElement[Any] = literal_column("rowid" if dialect == "sqlite" else "id")
                query = select(TABLE.c.id, _JOB.label("job"), TABLE.c.ordering_key, place.label("place")).where(*wanted)
                if last is not None:
                    query = query.where(place > last)
                rows = (await session.execute(query.order_by(place).limit(self._batch))).all()
                if not rows:
                    return
                jobs = {row.job: row.id for row in rows}
                keys = {row.ordering_key for row in rows if row.ordering_key is not None}
                if keys:
                    same_key = _is_among(TABLE.c.ordering_key, [*keys], dialect)
                    others = await session.execute(select(TABLE.c.id, _JOB.label("job")).where(*wanted, same_key))
                    jobs |= {row.job: row.id for row in others}
            last = rows[-1].place
            await change(_Batch(jobs=jobs, keys=sorted(keys)))

    async def _retry(self, batch: _Batch, chosen: Sequence[ColumnElement[bool]], record: Record) -> _Again:
        def recording(change: Callable[[Connection], _Again], connection: Connection) -> _Again:
            changed = change(connection)
            record.add(connection, len(changed.ready) + changed.waiting)
            return changed

        again = partial(_ready_again, ids=[*batch.jobs.values()], chosen=chosen)
        done = await self._database.transact(partial(recording, again))
        for start in range(0, len(batch.keys), KEYS_AT_ONCE):
            in_order = partial(_in_order_again, keys=batch.keys[start : start + KEYS_AT_ONCE], chosen=chosen)
            done = done.with_those_of(await self._database.transact(partial(recording, in_order)))
        await self._add(done.ready)
        return done

    async def _add(self, rows: Sequence[OwedRow]) -> None:
        for start in range(0, len(rows), JOBS_AT_ONCE):
            await self._queues.add_bulk([row.job() for row in rows[start : start + JOBS_AT_ONCE]])

    async def _running(self) -> set[str]:
        """Return the jobs that workers are running; there are only as many as all workers together hold."""
        found: set[str] = set()
        for queue in self._queues.all:
            page = await queue.manage.list(JobState.PROCESSING, limit=RUNNING_PAGE)
            found.update(job.id for job in page.jobs)
            while page.cursor is not None:
                page = await queue.manage.list(JobState.PROCESSING, cursor=page.cursor, limit=RUNNING_PAGE)
                found.update(job.id for job in page.jobs)
        return found

    async def _delete_rows(
        self, jobs: Mapping[str, str], conditions: Sequence[ColumnElement[bool]], record: Record
    ) -> set[str]:
        """Delete those of the rows that still name these jobs and meet the conditions. Return which."""
        gone = delete(TABLE).where(*conditions).returning(*_DROPPED)

        def delete_rows(connection: Connection) -> tuple[Sequence[Row[*tuple[Any, ...]]], Sequence[OwedRow]]:
            dialect = connection.dialect.name
            these = (_is_among(TABLE.c.id, [*jobs.values()], dialect), _is_among(_JOB, [*jobs], dialect))
            rows = connection.execute(gone.where(*these)).all()
            write_attempts(connection, [stalled_attempt(row) for row in rows if row.sending is not None])
            release(connection, [row.payload_id for row in rows])
            record.add(connection, len(rows))
            return rows, next_in_order(connection, places_of(rows), datetime.now(UTC))

        rows, ready = await self._database.transact(delete_rows)
        await self._add(ready)
        again = [row for row in rows if row.payload_id is not None and row.state is DeliveryState.READY]
        if again:
            await self._queues.remove([row.job_id or row.id for row in again])
        return {row.id for row in rows}

    async def _count_left(self, ids: Sequence[str], conditions: Sequence[ColumnElement[bool]]) -> int:
        async with self._database.read() as session:
            among = _is_among(TABLE.c.id, ids, session.get_bind().dialect.name)
            query = select(func.count()).select_from(TABLE).where(*conditions, among)
            return int((await session.execute(query)).scalar_one())


@asynccontextmanager
async def _recorded(database: Database, order: Order | None, under_way: UnderWay | None) -> AsyncIterator[Record]:
    if under_way is not None:
        yield under_way.record
        return
    async with recorded(database, order) as record:
        yield record


def _untouched_since(under_way: UnderWay | None) -> list[ColumnElement[bool]]:
    if under_way is None:
        return []
    moments = (col(DeliveryJob.settled_at), col(DeliveryJob.held_at))
    return [or_(moment.is_(None), moment <= under_way.since) for moment in moments]


def retryable(selection: Selection) -> ColumnElement[bool]:
    """Return the condition for the selected deliveries that may be retried.

    These are the ones that were given up, and held ones that are meant explicitly.
    """
    given_up = or_(is_in(DeliveryState.FAILED), is_in(DeliveryState.EXPIRED))
    means_held = selection.state is DeliveryState.HELD or (selection.state is None and selection.ids)
    return or_(given_up, is_in(DeliveryState.HELD)) if means_held else given_up


def _ready_again(connection: Connection, *, ids: Sequence[str], chosen: Sequence[ColumnElement[bool]]) -> _Again:
    """Make rows without an ordering key ready for a new series."""
    statement = (
        update(TABLE)
        .where(*chosen, TABLE.c.ordering_key.is_(None), _is_among(TABLE.c.id, ids, connection.dialect.name))
        .values(**_READY_AGAIN, attempts=0)
        .returning(*_OWED)
    )
    rows = [OwedRow(**row._mapping) for row in connection.execute(statement)]
    return _Again(ready=rows)


def _in_order_again(connection: Connection, *, keys: Sequence[str], chosen: Sequence[ColumnElement[bool]]) -> _Again:
    """Make rows of the ordering keys owed again where nothing younger is: the oldest is ready, the others wait for it.

    They keep the number of their attempts: a follow that was sent once must not be taken for one that never was.
    """
    lock_keys(connection, keys)
    meant = and_(*chosen).label("meant")
    columns = (*_OWED, *(TABLE.c[name] for name in ("ordering_key", "ordering_position", "state", "settled_at")), meant)
    of_keys = _is_among(TABLE.c.ordering_key, keys, connection.dialect.name)
    found = connection.execute(select(*columns).where(of_keys).order_by(TABLE.c.id).with_for_update()).all()
    done = _Again()
    waiting: list[str] = []
    for _, line in groupby(sorted(found, key=_place), key=lambda row: _place(row)[:2]):
        rows = list(line)
        last_open = max((index for index, row in enumerate(rows) if _is_open(row)), default=-1)
        has_older = False
        for index, row in enumerate(rows):
            is_open = _is_open(row)  # among the rows that are meant, this means held
            if row.meant and not has_older and (is_open or index > last_open):
                done.ready.append(_owed(row))
                has_older = True
            elif row.meant and not is_open and index > last_open:
                waiting.append(row.id)
            elif row.meant:
                done.out_of_order.add(row.id)
            has_older = has_older or is_open
    again = [{"row": row.id} for row in done.ready]
    if again:
        connection.execute(update(TABLE).where(TABLE.c.id == bindparam("row")).values(**_READY_AGAIN), again)
    if waiting:
        now = datetime.now(UTC)
        behind = {"state": DeliveryState.HELD, "held_reason": HoldReason.ORDER, "held_at": now}
        connection.execute(
            update(TABLE).where(TABLE.c.id == bindparam("row")).values(**_FRESH | behind),
            [{"row": each} for each in waiting],
        )
    return replace(done, waiting=len(waiting))


def _is_open(row: Row[*tuple[Any, ...]]) -> bool:
    return row.state in OPEN_STATES and row.settled_at is None


def _place(row: Row[*tuple[Any, ...]]) -> tuple[str, str, int]:
    return row.ordering_key, row.server_url or "", row.ordering_position or 0


def _owed(row: Row[*tuple[Any, ...]]) -> OwedRow:
    """Return the row as it is about to be: in its next series."""
    values = {field.name: row._mapping[field.name] for field in fields(OwedRow)}
    return OwedRow(**values | {"series": row.series + 1})


_JOB: Final = func.coalesce(TABLE.c.job_id, TABLE.c.id)
"""The queue job that may act for a row."""
_OWED: Final = tuple(TABLE.c[field.name] for field in fields(OwedRow))
_DROPPED: Final = tuple(TABLE.c[name] for name in ("job_id", "payload_id", "state", "ordering_key", *ATTEMPT_UNDER_WAY))
_FRESH: Final[dict[str, Any]] = {
    "held_reason": None,
    "held_at": None,
    "next_attempt_at": None,
    "settled_at": None,
    "outcome": None,
    "last_error": None,
    "error_code": None,
    "last_attempted_at": None,
    "first_attempted_at": None,
    "queued_at": None,
    "released_at": None,
    "canary_at": None,
    "sending": None,
    "holds": 0,
    "alone": 0,
    # A delivery that was under way in too many crashes runs apart from others again, alone.
    "suspect": case((TABLE.c.suspect.is_not(None), 1)),
}
_READY_AGAIN: Final[dict[str, Any]] = _FRESH | {
    "state": DeliveryState.READY,
    "series": TABLE.c.series + 1,
    "job_id": TABLE.c.id + "." + cast(TABLE.c.series + 1, Text),
}
"""The name of the series' job has the form of `rows.series_job_id`."""
