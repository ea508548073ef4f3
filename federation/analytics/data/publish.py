"""Publishing results to the application's database: the scorecards, and the relay ranking.

Theory of operation. The rows come from the results on disk, through the driver, in transactions of a few thousand rows
in the order of their keys. The executors do not write them: SQLite is one file on one machine with one writer,
PostgreSQL gains little (there is a row per server, not per attempt), and the database's password would travel in every
task. The driver holds one range of rows at a time, however many there are, and a node that shares an SQLite file waits
for one short transaction.

Every publication has a number, one more than any that the table has seen; each row carries the number of the
publication which wrote it last. After the last transaction, rows with smaller numbers belong to servers that have
vanished, and are deleted. A publication that dies half-way leaves old and new rows, each true as of its `as_of`; the
next one is whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql import functions as sf
from pyspark.sql.types import TimestampType
from sqlalchemy import Connection, Insert, Table, delete, func, inspect, select
from sqlalchemy.dialects import postgresql, sqlite

from db import Database, FederationTable, RelayCandidate, ServerScorecard
from federation import interrupts
from federation.analytics.data.results import RELAY_CANDIDATES, SERVER_SCORECARD, read_dated
from federation.analytics.days import DAY, instant
from federation.analytics.errors import AnalyticsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from federation.analytics.data.snapshots import Place

T = TypeVar("T")
Values = dict[str, object]

ROWS_AT_ONCE: Final = 2000
"""Rows per transaction."""

_ROWS_PER_RANGE: Final = 20_000
"""How many rows the driver asks the executors for at once."""

_SCORECARDS: Final = FederationTable.metadata.tables[str(ServerScorecard.__tablename__)]
_RELAYS: Final = FederationTable.metadata.tables[str(RelayCandidate.__tablename__)]


class NotPublishable(AnalyticsError):
    """The database cannot accept the results; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How many rows were written, and how many of vanished servers were removed.

    `newer` is None, or the later day whose results are in the database already: then nothing was written.
    """

    scorecards: int = 0
    relay_candidates: int = 0
    removed: int = 0
    newer: date | None = None


def require_publishable(database_url: str) -> None:
    """Check that the database answers and has the tables. Call it before hours of computing.

    Raises:
        NotPublishable: it lacks the tables.
        DatabaseUrlError, SQLAlchemyError: it cannot be opened.
    """
    interrupts.run(_with_database(database_url, _newest))


def publish(
    spark: SparkSession, out: Place, as_of: date, *, database_url: str, now: datetime | None = None
) -> Published:
    """Write what `out` holds as of `as_of` to the database's scorecards and relay ranking.

    Repeating it changes nothing. If the database holds those of a later day, nothing is written: recomputing the past
    does not undo the present. A day after tomorrow (by `now`) is none, and is replaced. Readers see rows change while
    this goes on, but never a row half-written.

    Raises:
        FileNotFoundError: `out` holds no results of that day; the database is as it was.
        NotPublishable: the database lacks the tables.
        SQLAlchemyError: it failed; what was committed stays, and publishing again completes it.
    """
    scorecards = read_dated(spark, out, SERVER_SCORECARD, as_of)
    relays = read_dated(spark, out, RELAY_CANDIDATES, as_of)

    async def write(database: Database) -> Published:
        newest = await _newest(database)
        # A day to come was asked for by mistake, and stands in the way of nothing.
        if newest is not None and as_of < newest <= (now or datetime.now(UTC)).date() + DAY:
            return Published(newer=newest)
        written, vanished = await _replace(database, _SCORECARDS, scorecards)
        ranked, unranked = await _replace(database, _RELAYS, relays)
        return Published(scorecards=written, relay_candidates=ranked, removed=vanished + unranked)

    return interrupts.run(_with_database(database_url, write))


async def _with_database(url: str, work: Callable[[Database], Awaitable[T]]) -> T:
    database = Database(url)
    try:
        return await work(database)
    finally:
        await database.close()


async def _newest(database: Database) -> date | None:
    """Return the latest day whose results the database holds."""
    async with database.read() as session:
        await (await session.connection()).run_sync(_require_tables)
        days = [await session.scalar(select(func.max(table.c.as_of))) for table in (_SCORECARDS, _RELAYS)]
    return max((day for day in days if day is not None), default=None)


def _require_tables(connection: Connection) -> None:
    known = inspect(connection)
    if missing := [table.name for table in (_SCORECARDS, _RELAYS) if not known.has_table(table.name)]:
        raise NotPublishable(f"the database has no table {' and no '.join(missing)}; run `federation upgrade`")


async def _replace(database: Database, table: Table, frame: DataFrame) -> tuple[int, int]:
    """Write the rows, and delete those that this publication did not write. Return how many of each."""
    async with database.read() as session:
        generation = 1 + (await session.scalar(select(func.max(table.c.generation))) or 0)
    written = 0
    for batch in _batches(frame, table):
        async with database.transaction() as session:
            upsert = _upsert(table, session.get_bind().dialect.name)
            await session.execute(upsert, [{**values, "generation": generation} for values in batch])
        written += len(batch)
    async with database.transaction() as session:
        is_old = table.c.generation < generation
        removed = await session.scalar(select(func.count()).select_from(table).where(is_old)) or 0
        await session.execute(delete(table).where(is_old))
    return written, removed


def _upsert(table: Table, dialect: str) -> Insert:
    statement = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    values = {column.name: statement.excluded[column.name] for column in table.c if not column.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=values)


def _batches(frame: DataFrame, table: Table) -> Iterator[list[Values]]:
    """Yield the rows in the order of the table's key.

    So two publications at once never wait for each other in a circle.
    """
    keys = [column.name for column in table.primary_key]
    times = {field.name for field in frame.schema if isinstance(field.dataType, TimestampType)}
    # As a Python `datetime`, an instant would become local time in the zone of this process.
    plain = frame.withColumns({name: sf.unix_micros(sf.col(name)) for name in times})
    plain = plain.select(*(column.name for column in table.columns if column.name in frame.columns))
    ranges = max(1, math.ceil(frame.count() / _ROWS_PER_RANGE))
    ordered = plain.repartitionByRange(ranges, *keys).sortWithinPartitions(*keys)
    rows = (
        {name: _storable(value, is_time=name in times) for name, value in row.asDict().items()}
        for row in ordered.toLocalIterator()
    )
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        yield batch


def _storable(value: object, *, is_time: bool) -> object:
    match value:
        case int() if is_time:
            return instant(value)
        case float() if not math.isfinite(value):
            return None
        case str():
            return value.replace("\x00", "\ufffd")  # PostgreSQL's text cannot hold a NUL
        case list():
            return [_storable(each, is_time=False) for each in value]
        case _:
            return value
