"""Copy all rows of an SQLite database into another one, SQLite or PostgreSQL, that has the tables and no rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Connection, Engine, Table, delete, exists, func, insert, literal, select
from sqlalchemy.exc import DataError, IntegrityError

from db.catalog import columns, missing
from db.columns import FederationTable, HostTable
from db.engines import reading_engine, writing_engine
from db.host import columns_of_host
from db.migrate import schema_version
from db.url import parse_url

SEEDED: Final = frozenset({"blacklist_revision", "database_identity"})
"""Tables that have rows as soon as a migration has made them; in a copy the source's take their place."""

LEFT: Final = frozenset({"queue_sightings"})
"""Tables of what processes of the source saw, and where: of a copy, none of it would be true."""

BATCH: Final = 200
"""Rows in memory; a text may have hundreds of kilobytes."""


class CopyError(Exception):
    """Nothing was copied; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """How many rows each table had, by its name; and the host's tables that are its own to move."""

    rows: Mapping[str, int]
    left_to_host: tuple[str, ...]


def copy_database(source: Path, url: str) -> Copied:
    """Put every row of our tables in the SQLite file `source` into the database of `url`, unchanged, or none.

    What processes saw of each other (`LEFT`) is no part of it. Both are at this version's migration. `user`, `posts`
    and `blocks` are copied, too, where both have no more of them than our minimal tables. Sequences go on after the
    highest number. The source is read as of one moment, and only read. Blocking; to be called when no process works on
    either database.

    Raises:
        CopyError: a database lacks tables, the target has rows, or the source was written to meanwhile.
        DatabaseUrlError: as `Database`.
        SQLAlchemyError: a database failed.
    """
    if not source.is_file():
        raise CopyError(f"there is no database {source}")
    target = parse_url(url)
    if target.get_backend_name() == "sqlite" and Path(target.database or "").resolve() == source.resolve():
        raise CopyError(f"{source} is the database itself: set DATABASE_URL to the new one first")
    with (
        _disposed(reading_engine(URL.create("sqlite", database=str(source)))) as reading,
        _disposed(writing_engine(target)) as writing,
        writing.begin() as new,
        _snapshot(reading) as old,  # inside, so that nothing is committed if its end raises
    ):
        return _copy(old, new)


def _copy(old: Connection, new: Connection) -> Copied:
    for connection, which in ((old, "the old database"), (new, "the new database")):
        _require_schema(connection, which)
    host, left = _host_tables(old, new)
    plain = [table for table in FederationTable.metadata.sorted_tables if table.name not in SEEDED]
    _require_empty(new, [*plain, *host])
    counts = {table.name: _copy_rows(old, new, table) for table in [*plain, *host] if table.name not in LEFT}
    # Last: triggers of the other tables write to some of them.
    for table in FederationTable.metadata.sorted_tables:
        if table.name in SEEDED:
            new.execute(delete(table))
            counts[table.name] = _copy_rows(old, new, table)
    return Copied(rows=counts, left_to_host=left)


def _require_schema(connection: Connection, which: str) -> None:
    version = schema_version(connection)
    if version.current != version.expected or missing(connection, FederationTable.metadata):
        raise CopyError(
            f"{which} does not have the tables of this version (it is at migration {version.current}, they are of"
            f" {version.expected}): "
            + (version.remedy if version.is_unpublished else "run `federation upgrade` with it as DATABASE_URL")
        )


def _host_tables(old: Connection, new: Connection) -> tuple[Sequence[Table], tuple[str, ...]]:
    """Return those to copy and those to leave: all or none, because they refer to each other."""
    tables = HostTable.metadata.sorted_tables
    names = [table.name for table in tables]
    there = [table for table in tables if table.name in columns(old, names)]
    if not there:
        return (), ()
    lacking = missing(old, HostTable.metadata)
    is_own = any(name.startswith(f"{table.name}.") for table in there for name in lacking)
    if is_own or any(columns_of_host(each, table.name) for each in (old, new) for table in there):
        return (), tuple(table.name for table in there)
    if any(name.partition(".")[0] in {table.name for table in there} for name in missing(new, HostTable.metadata)):
        raise CopyError(
            f"the old database has {', '.join(table.name for table in there)}, the new one has not:"
            " run `federation upgrade --host-tables` with it as DATABASE_URL"
        )
    return there, ()


def _require_empty(connection: Connection, tables: Sequence[Table]) -> None:
    filled = [table.name for table in tables if connection.execute(select(exists(select(table)))).scalar_one()]
    if filled:
        raise CopyError(f"the new database is in use: {', '.join(filled)} have rows; copy into an empty one")


def _copy_rows(old: Connection, new: Connection, table: Table) -> int:
    """Copy by the columns' own types, so that times, booleans and JSON have each database's form."""
    count = 0
    found = old.execution_options(yield_per=BATCH).execute(select(table))
    try:
        for batch in found.mappings().partitions(BATCH):
            new.execute(insert(table), [dict(row) for row in batch])
            count += len(batch)
    except (DataError, IntegrityError, LookupError, ValueError) as error:
        why = type(error.__cause__ or error).__name__  # not its text, which may quote the row
        raise CopyError(
            f"a row of {table.name} does not fit into the new database ({why}); nothing was copied"
        ) from error
    _restart_sequence(new, table)
    return count


def _restart_sequence(connection: Connection, table: Table) -> None:
    """Set PostgreSQL's past the highest number: it does not notice rows that bring theirs. SQLite goes by the rows."""
    column = table.autoincrement_column
    if column is None or connection.dialect.name != "postgresql":
        return
    name = connection.dialect.identifier_preparer.format_table(table)
    sequence = connection.execute(select(func.pg_get_serial_sequence(name, column.name))).scalar_one()
    highest = connection.execute(select(func.max(column))).scalar_one()
    if sequence is not None and highest is not None:
        connection.execute(select(func.setval(literal(sequence), highest)))


@contextmanager
def _snapshot(engine: Engine) -> Iterator[Connection]:
    """Yield the source as of one moment.

    Raises:
        CopyError: at the end: somebody wrote to it meanwhile, and may go on doing so.
    """
    with engine.connect() as connection:
        before = _version(connection)
        connection.exec_driver_sql("BEGIN")
        yield connection
        connection.exec_driver_sql("ROLLBACK")
        if _version(connection) != before:
            raise CopyError(
                "the old database was written to while it was copied; nothing was copied: stop its processes first"
            )


def _version(connection: Connection) -> object:
    """Return a number that changes with every commit of another connection."""
    return connection.exec_driver_sql("PRAGMA data_version").scalar_one()


@contextmanager
def _disposed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.dispose()
