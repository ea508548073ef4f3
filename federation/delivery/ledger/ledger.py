"""What becomes of each delivery, written to the database in groups.

Theory of operation. Attempts run side by side, and each writes twice: before it sends, and when it knows the outcome.
One transaction per write would cost more than the delivery, so concurrent writes share one (see `Batcher`). Under load
it first waits a few milliseconds for more. Most entries are as usual, and have a shorter way. On SQLite it is part of
the group's transaction; on PostgreSQL it is a line of its own, a single statement that hands on the others. A caller
returns only after its entry is committed, so everything an attempt reported is on disk before its job is settled. Every
entry may be repeated: a crash between the commit and the settling of the job runs the attempt again.

While the database does not answer, nothing could be written of an attempt, so no delivery is claimed (`DatabaseWatch`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol, TypeVar, cast

import structlog
from msgspec.structs import replace
from sqlalchemy import Connection, literal, select
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from db import Database
from db.errors import is_outage
from federation.base.logs import crash
from federation.delivery.ledger.attempt_log import AttemptRecord
from federation.delivery.ledger.entries import Abandoned, Begin, Begun, Ended, Entry, Gone, NotBegun
from federation.delivery.ledger.postgres_fast_path import UsualEntry, may_be_usual, write_usual
from federation.delivery.ledger.sqlite_fast_path import write_usual as write_usual_on_sqlite
from federation.delivery.ledger.statements import Group, Written
from federation.delivery.rows import OwedRow, PlannedJob
from federation.delivery.wire import Effect
from workers.batching import Batcher
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

MAX_GROUP: Final = 500
MAX_ERROR_CHARACTERS: Final = 1_000
LINGER_SECONDS: Final = 0.002
"""How long the loop waits for more entries under load: a commit costs as much as several entries. Longer waits leave
the loop idle, as slots are filled again while ends are stored: 15 ms took away two fifths of the deliveries."""

CROWD: Final = 4
"""A group with more entries than this counts as load."""

DATABASE_ASKED_EVERY: Final = timedelta(seconds=1)
"""The time between two looks at a database that does not answer."""

REFUSALS_LOGGED_EVERY: Final = timedelta(minutes=1)

_ANYTHING: Final = select(literal(1))

_REFUSED: Final = (DataError, IntegrityError)
"""Errors of the database that blame an entry; so does all that is none, such as a text without a UTF-8 form."""


_Entry = TypeVar("_Entry", Entry, UsualEntry)


class AddJobs(Protocol):
    """Adds the jobs of deliveries to the queue, after the commit that made them due."""

    async def __call__(self, jobs: Sequence[PlannedJob], /) -> object: ...


def _batcher(write: Callable[[Sequence[_Entry]], Awaitable[Sequence[object]]]) -> Batcher[_Entry, object]:
    return Batcher(
        write,
        MAX_GROUP,
        is_common=lambda error: isinstance(error, SQLAlchemyError) and not isinstance(error, _REFUSED),
        linger=LINGER_SECONDS,
        crowd=CROWD,
        skips_cancelled=False,
    )


class Ledger:
    """Group commit for delivery rows. Its methods may be called by any number of tasks of one event loop."""

    def __init__(self, database: Database, *, add_jobs: AddJobs | None = None, clock: Clock | None = None) -> None:
        self._database = database
        self._add_jobs = add_jobs
        self._clock = clock or SystemClock()
        self._batcher: Batcher[Entry, object] = _batcher(self._write_group)
        self._usual: Batcher[UsualEntry, object] = _batcher(self._write_usual)
        self._adding: asyncio.Task[None] | None = None

    async def begin(self, entry: Begin) -> Begun | NotBegun:
        """Count one more attempt in the row, and note it as under way, if the job may send at all."""
        return cast(Begun | NotBegun, await self._write(entry))

    async def gone(
        self,
        delivery_id: str,
        *,
        effect: Effect | None = None,
        attempt: AttemptRecord | None = None,
        shared: bool = False,
    ) -> bool:
        """Remove the row and write the acknowledgment's effect, both or neither. Return whether it changed something.

        Raises:
            EffectFailed: the wire broke off; the row is as it was.
        """
        entry = Gone(delivery_id=delivery_id, effect=effect, attempt=attempt, shared=shared)
        return cast(bool, await self._write(entry))

    async def ended(self, entry: Ended) -> bool:
        """Write what became of the attempt to the row. Return False if the row no longer names the attempt's job."""
        error = entry.error.replace("\x00", "")[:MAX_ERROR_CHARACTERS]
        return cast(bool, await self._write(replace(entry, error=error)))

    async def abandoned(self, entry: Abandoned) -> bool:
        """Hold the row, if it is ready and names that job."""
        return cast(bool, await self._write(entry))

    async def close(self) -> None:
        """Wait until everything that was handed in is committed, or has failed."""
        await self._usual.close()
        await self._batcher.close()
        await self._jobs_added()

    async def _write(self, entry: Entry) -> object:
        """Hand in the entry, wait for its commit, and return its result.

        If the caller is cancelled meanwhile, the entry is written all the same.

        Raises:
            SQLAlchemyError: the entry was not committed; the whole attempt is worth repeating.
        """
        if not self._database.is_sqlite and may_be_usual(entry):
            result = await self._usual.put(entry)
            return await result if isinstance(result, asyncio.Future) else result
        return await self._batcher.put(entry)

    async def _write_usual(self, entries: Sequence[UsualEntry]) -> Sequence[object]:
        """Write what is as usual, and hand in the others, whether or not anybody waits for them any more."""
        results = await write_usual(self._database, entries)
        return [
            self._batcher.put(entry) if result is None else result
            for entry, result in zip(entries, results, strict=True)
        ]

    async def _write_group(self, entries: Sequence[Entry]) -> Sequence[object]:
        await self._jobs_added()
        now = self._clock.now()
        written = await self._database.transact(lambda connection: _written(connection, entries, now))
        if written.ready and self._add_jobs is not None:
            self._adding = asyncio.create_task(self._add(self._add_jobs, written.ready), name="ordered-jobs")
        return written.results

    async def _jobs_added(self) -> None:
        """Wait until no jobs are being added.

        Jobs are added one group at a time: otherwise those of many groups would wait for an absent queue.
        """
        if self._adding is not None:
            await asyncio.wait([self._adding])

    async def _add(self, add_jobs: AddJobs, rows: Sequence[OwedRow]) -> None:
        try:
            await add_jobs([row.job() for row in rows])
        except Exception as error:  # the rows are owed and ready: the sweeper finds that they have no job
            log.error("ordered_jobs_not_added", delivery_ids=[row.id for row in rows][:20], **crash(error))


def _written(connection: Connection, entries: Sequence[Entry], now: datetime) -> Written:
    """Write the entries in the connection's transaction, on SQLite most of them on a shorter way."""
    results = {**write_usual_on_sqlite(connection, entries)} if connection.dialect.name == "sqlite" else {}
    others = {place: entry for place, entry in enumerate(entries) if place not in results}
    written = Group(connection, now).write(list(others.values())) if others else Written(results=[], ready=[])
    results.update(zip(others, written.results, strict=True))
    return Written(results=[results[place] for place in range(len(entries))], ready=written.ready)


class DatabaseWatch:
    """Learns of trouble from whoever runs into it; the worker asks it before each claim."""

    def __init__(self, database: Database, *, interval: timedelta = DATABASE_ASKED_EVERY) -> None:
        self._database = database
        self._interval = interval
        self._in_trouble = False
        self._refusal_told_at = -math.inf

    def note_trouble(self, error: SQLAlchemyError) -> None:
        """Note that the database did not answer, or that it refused a statement, as where a table is missing.

        Only an outage stops claims. A database that refuses statements still answers, so asking whether it answers
        would not show when it has recovered.
        """
        if is_outage(error):
            if not self._in_trouble:
                log.error("database_away", then="no delivery is claimed until it answers")
            self._in_trouble = True
        elif monotonic() - self._refusal_told_at >= REFUSALS_LOGGED_EVERY.total_seconds():
            self._refusal_told_at = monotonic()
            log.error(
                "database_refuses", error=type(error).__name__, advice="`federation doctor` names what is missing"
            )

    def not_ready(self) -> Coroutine[object, object, None] | None:
        """Return None while the database answers, otherwise a coroutine that ends when it answers again."""
        return self._until_it_answers() if self._in_trouble else None

    async def _until_it_answers(self) -> None:
        while self._in_trouble:
            try:
                await self._database.rows(_ANYTHING)
            except SQLAlchemyError:
                await asyncio.sleep(self._interval.total_seconds())
            else:
                self._in_trouble = False
                log.info("database_back")
