"""Giving failed deliveries another chance, and giving deliveries up; a million of them, in batches.

Theory of operation. Both walk the rows there are, each once, a batch at a time: no transaction is long, what is done
stays done if the command is stopped, and repeating it does the rest. They go by id, and on SQLite in the order of the
file: ids are random, and a batch of them would touch as many pages as rows. Jobs may live elsewhere than rows, so the
order of steps makes every interruption harmless.

`retry` removes the failed job, reopens the row, adds the job. After the first step the row still counts as failed.
After the second it is owed, unattempted and without a job: just what the outbox sweeper looks for. No attempt can be
under way, because the job of a failed row has ended; where somebody else set it going again, it is left alone, and
adding it once more adds nothing.

`drop` removes the job, then the row. A job that a worker is running stays, and so does its row: the delivery may be
arriving at this moment, and what the attempt reports must find its row. Which are running is asked before and after the
removal, so one that ends in between is not taken for one that never began. What a job could still come from are the
sweeper, which adds those of rows never attempted, and an attempt that began and failed between two of these steps: so
jobs of open rows that refer to a shared text, which the end of one row does not take away, are removed once more. Any
other completes without sending when it finds its text gone.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Connection,
    Row,
    Text,
    any_,
    delete,
    func,
    literal,
    literal_column,
    select,
    type_coerce,
    update,
)
from sqlmodel import col

from db import Database, DeliveryJob
from federation.admin.deliveries import DeliveryState, Selection, count
from federation.base.bull_queue import BullQueue
from federation.delivery.payloads import release
from federation.delivery.sweeper import OwedRow
from workers import JobState

BATCH: Final = 5_000
RUNNING_PAGE: Final = 1_000
JOBS_AT_ONCE: Final = 1_000
"""Added in one round trip: a statement of several thousand is slower."""

Progress = Callable[[int], None]
"""Told how many rows more have been dealt with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """How many deliveries are owed again; `left` were not, for a Node producer wrote them and has their jobs."""

    retried: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """How many deliveries are given up; `busy`: an attempt at them is under way, they are as they were."""

    dropped: int
    busy: int


def _unwatched(_rows: int) -> None:
    pass


def _is_among(ids: Sequence[str], dialect: str) -> ColumnElement[bool]:
    """As `IN`, with all ids in one parameter: a statement of thousands takes longer to write than to run."""
    if dialect == "postgresql":
        return col(DeliveryJob.id) == any_(literal(list(ids), ARRAY(Text)))
    listed = func.json_each(json.dumps(list(ids))).table_valued("value")
    return col(DeliveryJob.id).in_(select(listed.c.value))


class BulkDeliveries:
    """Changes many deliveries of one node."""

    def __init__(self, database: Database, queue: BullQueue, *, batch: int = BATCH) -> None:
        self._database = database
        self._queue = queue
        self._batch = batch

    async def retry(self, selection: Selection, *, progress: Progress = _unwatched) -> Retried:
        """Every failed delivery among the selected is owed again, with fresh attempts, and its job is in the queue.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue failed; repeating it does the rest.
        """
        failed = [*selection.conditions(), *Selection(state=DeliveryState.FAILED).conditions()]
        unnamed = col(DeliveryJob.job_name).is_(None)
        retried = 0

        async def retry_batch(ids: Sequence[str]) -> None:
            nonlocal retried
            retried += await self._retry(ids)
            progress(len(ids))

        await self._each_batch([*failed, ~unnamed], retry_batch)
        return Retried(retried=retried, left=await count(self._database, [*failed, unnamed]))

    async def drop(self, selection: Selection, *, progress: Progress = _unwatched) -> Dropped:
        """The selected deliveries are given up: row, text and job are gone, but for those a worker is just trying.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue failed; repeating it does the rest.
        """
        conditions = selection.conditions()
        dropped = busy = 0

        async def drop_batch(ids: Sequence[str]) -> None:
            nonlocal dropped, busy
            before = await self._running()
            removed = await self._queue.storage.remove(ids)
            running = (before | await self._running()).intersection(ids)
            busy += len(running)
            idle = [each for each in ids if each not in running]
            dropped += await self._delete_rows(idle, conditions, had_jobs=removed == len(idle))
            progress(len(ids))

        await self._each_batch(conditions, drop_batch)
        return Dropped(dropped=dropped, busy=busy)

    async def _each_batch(
        self, conditions: Sequence[ColumnElement[bool]], change: Callable[[Sequence[str]], Awaitable[None]]
    ) -> None:
        await self._queue.start()
        made_before = col(DeliveryJob.created_at) <= datetime.now(UTC)
        last: object = None
        while True:
            async with self._database.read() as session:
                is_sqlite = session.get_bind().dialect.name == "sqlite"
                place: ColumnElement[object] = literal_column("rowid" if is_sqlite else "id")
                query = select(col(DeliveryJob.id), place.label("place")).where(made_before, *conditions)
                if last is not None:
                    query = query.where(place > last)
                rows = (await session.execute(query.order_by(place).limit(self._batch))).all()
            if not rows:
                return
            last = rows[-1].place
            await change([row.id for row in rows])

    async def _retry(self, ids: Sequence[str]) -> int:
        await self._queue.storage.remove(ids)
        reopened = (
            update(DeliveryJob)
            .where(col(DeliveryJob.settled_at).is_not(None))
            .values(
                settled_at=None,
                outcome=None,
                last_error=None,
                error_code=None,
                last_attempted_at=None,
                attempts=0,
                queued_at=None,
            )
            .returning(*(getattr(DeliveryJob, column.name) for column in fields(OwedRow)))
        )
        async with self._database.transaction() as session:
            connection = await session.connection()
            found = await connection.execute(reopened.where(_is_among(ids, connection.dialect.name)))
            rows = [OwedRow(**row._mapping) for row in found]
        for start in range(0, len(rows), JOBS_AT_ONCE):
            await self._queue.add_bulk([row.job() for row in rows[start : start + JOBS_AT_ONCE]])
        return len(rows)

    async def _running(self) -> set[str]:
        """The jobs that are at a worker: as many as all workers together hold."""
        page = await self._queue.manage.list(JobState.PROCESSING, limit=RUNNING_PAGE)
        found = {job.id for job in page.jobs}
        while page.cursor is not None:
            page = await self._queue.manage.list(JobState.PROCESSING, cursor=page.cursor, limit=RUNNING_PAGE)
            found.update(job.id for job in page.jobs)
        return found

    async def _delete_rows(
        self, ids: Sequence[str], conditions: Sequence[ColumnElement[bool]], *, had_jobs: bool
    ) -> int:
        """The rows are gone, if they still meet the conditions; `had_jobs`: the jobs of all of them were removed."""
        # The times as they come, for whether there is one: SQLite 3.40 says of a row it deletes that nothing is null.
        times = (type_coerce(col(each), Text) for each in (DeliveryJob.settled_at, DeliveryJob.last_attempted_at))
        gone = (
            delete(DeliveryJob).where(*conditions).returning(col(DeliveryJob.id), col(DeliveryJob.payload_id), *times)
        )

        def delete_rows(connection: Connection) -> Sequence[Row[*tuple[Any, ...]]]:
            rows = connection.execute(gone.where(_is_among(ids, connection.dialect.name))).all()
            release(connection, [row.payload_id for row in rows])
            return rows

        rows = await self._database.transact(delete_rows)
        shared = [row for row in rows if row.payload_id is not None and row.settled_at is None]
        again = [row.id for row in shared if row.last_attempted_at is None or not had_jobs]
        if again:
            await self._queue.storage.remove(again)
        return len(rows)
