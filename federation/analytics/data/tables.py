"""The application's tables, and how one is read in parts through SQLAlchemy.

This module travels to the executors with the data source: see `source`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pyarrow
import sqlalchemy
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType
from sqlalchemy import ColumnElement, Connection, Select, case, column, func, label, type_coerce
from sqlalchemy.types import NullType

# Imported by name, not by module: names travel to the executors, a module would have to be there.
from db.engines import reading_engine
from db.url import parse_url
from federation.analytics.data.arrow_columns import UNREADABLE, to_batch
from federation.analytics.data.pushdown import Bound, between, condition
from federation.analytics.data.python_workers import SparesWorker
from federation.analytics.frames import (
    ACCEPTED_KEYS,
    ATTEMPTS,
    BLACKLIST,
    DELIVERIES,
    HEALTH_EVENTS,
    LINKS,
    LOSSES,
    SERVERS,
)

if TYPE_CHECKING:
    from sqlalchemy import URL

BATCH_ROWS: Final = 20_000
"""Rows of one Arrow batch, which a task holds in memory at a time, and the fewest rows for a task of its own."""

DEFAULT_PARTITIONS: Final = 8
"""The fewest parts of a large table, unless fewer are asked for."""

ROWS_PER_PARTITION: Final = 1_000_000
"""About as many does a part have, of a table that is larger than its fewest parts hold."""

MOST_PARTITIONS: Final = 500

_EARLIEST: Final = datetime(1, 1, 1)  # noqa: DTZ001 - the database's times are UTC without a zone
_LATEST: Final = datetime(9999, 12, 31)  # noqa: DTZ001 - as above


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that can be read: its columns, and what divides it into parts that are read separately."""

    schema: StructType
    time: str | None = None
    counts_up: bool = False
    is_large: bool = False
    """It grows with the deliveries, and its ids are texts."""


TABLES: Final = {
    "delivery_attempts": Table(schema=ATTEMPTS, time="started_at", counts_up=True),
    "server_registry": Table(schema=SERVERS),
    "blacklisted_servers": Table(schema=BLACKLIST),
    "server_links": Table(schema=LINKS),
    "delivery_jobs": Table(schema=DELIVERIES, is_large=True),
    "delivery_losses": Table(schema=LOSSES, is_large=True),
    "accepted_keys": Table(schema=ACCEPTED_KEYS),
    "server_health_events": Table(schema=HEALTH_EVENTS, time="at", counts_up=True),
}


def table_of(options: dict[str, str]) -> Table:
    """Return the table that the option `table` names.

    Raises:
        ValueError: it names none that can be read.
    """
    name = options.get("table", "")
    if name not in TABLES:
        raise ValueError(f"option `table` must be one of {', '.join(TABLES)}, not {name!r}")
    return TABLES[name]


@dataclass(frozen=True)
class TablePart(InputPartition):
    """The rows whose `column` is at least `low` and below `high`; None is no bound."""

    column: str | None = None
    low: Bound | None = None
    high: Bound | None = None


class TableReader(SparesWorker, DataSourceReader):
    """Reads parts of a table, each in one transaction, in batches as the database yields them.

    Parts see different moments. Rows that are only ever added, such as attempts, are still read once each.
    """

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        if "url" not in options:
            raise ValueError("option `url` is missing: the database, as sqlite:///file.db or postgresql://host/name")
        self._url: URL = parse_url(options["url"])
        self._table = table_of(options)
        self._name = options["table"]
        self._schema = schema
        self._columns = StructType([field for field in schema if field.name != UNREADABLE])
        """Those that the table has."""
        unknown = set(schema.names) - set(self._table.schema.names)
        if unknown:
            raise ValueError(f"{self._name} has no column {sorted(unknown)[0]!r}")
        self._asked = int(options["partitions"]) if "partitions" in options else None
        self._partitions = self._asked or DEFAULT_PARTITIONS
        self._since, self._until = (_moment(options, name) for name in ("since", "until"))
        if self._table.time is None and (self._since or self._until):
            raise ValueError(f"{self._name} has no time that `since` and `until` could bound")
        self._filters: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take the filters that the database can apply, and yield those that Spark has to apply again.

        With SQLite, whose columns may hold anything, that is all of them; the database applies what it can all the
        same.
        """
        for each in filters:
            self._filters.append(each)
            if not self._is_typed or condition(each, self._columns, typed=True) is None:
                yield each

    def partitions(self) -> Sequence[TablePart]:
        by_time = self._since is not None or self._until is not None
        if not self._table.counts_up and not self._table.is_large:
            return [TablePart()]
        with self._connected() as connection:
            if self._table.is_large:
                return _parts("id", [None, *self._every_so_many(connection), None])
            low, high = self._ids(connection)
            if self._asked is None and low is not None and high is not None:
                wanted = -(-(high + 1 - low) // ROWS_PER_PARTITION)
                self._partitions = min(max(wanted, DEFAULT_PARTITIONS), MOST_PARTITIONS)
            return self._parts_of_time(connection) if by_time else self._parts_of_ids(low, high)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        if not isinstance(partition, TablePart):
            raise TypeError(f"{type(partition).__name__} is no part of a table")
        fields = self._schema.fields
        with self._connected() as connection:
            streaming = connection.execution_options(stream_results=True, max_row_buffer=BATCH_ROWS)
            for rows in streaming.execute(self._select(partition)).partitions(BATCH_ROWS):
                yield to_batch(rows, fields)

    @property
    def _is_typed(self) -> bool:
        return self._url.get_backend_name() != "sqlite"

    def _connected(self) -> Connection:
        return reading_engine(self._url).connect()

    def _select(self, part: TablePart) -> Select[*tuple[object, ...]]:
        chosen = sqlalchemy.table(self._name, *(column(name) for name in self._table.schema.names))
        wanted = [self._raw(name) for name in self._columns.names]
        query = sqlalchemy.select(*wanted).select_from(chosen)
        if part.column is not None:
            query = query.where(*between(part.column, part.low, part.high, typed=self._is_typed))
        pushed = (condition(each, self._columns, typed=self._is_typed) for each in self._filters)
        return query.where(*(each for each in pushed if each is not None))

    def _raw(self, name: str) -> ColumnElement[object]:
        """Return the column as the driver returns it; a time of PostgreSQL that no datetime can hold is null."""
        raw: ColumnElement[object] = type_coerce(column(name), NullType())
        if self._is_typed and self._table.schema[name].dataType.typeName() == "timestamp":
            held = column(name, sqlalchemy.DateTime()).between(_EARLIEST, _LATEST)
            raw = case((held, raw))
        return label(name, raw)

    def _ids(self, connection: Connection) -> tuple[int | None, int | None]:
        """Return the first and the last id, which the primary key's index knows; they tell how large the table is."""
        chosen = sqlalchemy.table(self._name, column("id"))
        low, high = connection.execute(sqlalchemy.select(func.min(chosen.c.id), func.max(chosen.c.id))).one()
        return low, high

    def _every_so_many(self, connection: Connection) -> Sequence[str]:
        """Return one id of each so many, as the primary key has them: texts tell no number."""
        chosen = sqlalchemy.table(self._name, column("id", sqlalchemy.Text()))
        numbered = sqlalchemy.select(chosen.c.id, func.row_number().over(order_by=chosen.c.id).label("n")).subquery()
        cuts = sqlalchemy.select(numbered.c.id).where(numbered.c.n % ROWS_PER_PARTITION == 0).order_by(numbered.c.n)
        return connection.execute(cuts).scalars().all()

    def _parts_of_ids(self, low: int | None, high: int | None) -> list[TablePart]:
        if low is None or high is None:
            return [TablePart()]
        step = max(BATCH_ROWS, -(-(high + 1 - low) // self._partitions))
        # The ends are open: a row that is added meanwhile may be read or not, a row with an odd id is read.
        starts = range(low, high + 1, step)
        return _parts("id", [None, *starts[1:], None])

    def _parts_of_time(self, connection: Connection) -> list[TablePart]:
        time = self._table.time
        assert time is not None
        since, until = self._since, self._until
        if since is None or until is None:
            chosen = sqlalchemy.table(self._name, column(time, sqlalchemy.DateTime()))
            within = between(time, since, until, typed=self._is_typed)
            ends = sqlalchemy.select(func.min(chosen.c[time]), func.max(chosen.c[time])).where(*within)
            try:
                first, last = connection.execute(ends).one()
            except (TypeError, ValueError, sqlalchemy.exc.DataError):
                first = last = None  # no time that a datetime can hold: few rows, in one part
            if first is None:
                return [TablePart(column=time, low=since, high=until)]
            low, high = since or first, until or last
        else:
            low, high = since, until
        step = max(timedelta(minutes=1), (high - low) / self._partitions)
        whole_seconds = (low + step * number for number in range(1, self._partitions))
        inner = [each.replace(microsecond=0) for each in whole_seconds if each < high]
        return _parts(time, [since, *inner, until])


def _moment(options: dict[str, str], name: str) -> datetime | None:
    """Return the time in UTC, without a zone, as the database has it."""
    text = options.get(name)
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"option `{name}` must be a day or time as 2025-01-31 or 2025-01-31T12:00:00Z") from None
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment


def _parts(name: str, cuts: Sequence[Bound | None]) -> list[TablePart]:
    return [TablePart(column=name, low=low, high=high) for low, high in itertools.pairwise(cuts)]
