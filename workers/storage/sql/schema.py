"""The `workers_*` tables, and how a database comes to have them.

Theory of operation. Queues share the tables and are told apart by a small integer. A job's row is small and changes
often. Its payload is in `workers_payloads` and is written once, then replaced by the result when the job completes.
`state` is finer than the public state: `held` is a queued job that its holding key keeps back: its ordering key is
busy, its limit lets no more start, or another of its fair key comes first. The column `ordering_key` has the holding
key, see `workers.limits`.

Every transition finds its rows through a partial index that holds just the rows in question, in the order wanted, so
that no step grows with the backlog: `ready` and `ready_by_name` in claim order, `delayed` by due time, `leases` by
deadline, `finished` by expiry. SQLite appends the row's `seq` to each, which makes equal times first come, first
served; PostgreSQL is told to. There every step is a function (`postgres/steps.sql`), and events need no
table, but where nobody can listen.
Deduplication keys are in `steps/enqueue`, jobs that follow others in `steps/dependents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from importlib import resources
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    inspect,
    text,
)
from sqlalchemy.schema import CreateIndex, CreateTable, SchemaItem

from workers.errors import StorageError

VERSION: Final = 11
"""The smaller ones were those of checkouts before 1.0."""

metadata: Final = MetaData()
_FUNCTIONS: Final = (
    "postgres/limits.sql",
    "postgres/steps.sql",
    "postgres/keys.sql",
    "postgres/dependents.sql",
)
# SQLite's triggers; PostgreSQL's are in `postgres/dependents.sql`, and `dependents` tells what they are for.
_TRIGGERS: Final = (
    "CREATE TRIGGER IF NOT EXISTS workers_jobs_ended AFTER UPDATE OF state ON workers_jobs"
    " WHEN OLD.dependents AND OLD.expires_at IS NULL AND NEW.expires_at IS NOT NULL BEGIN"
    " UPDATE workers_dependencies SET ended = NEW.state, error = CASE NEW.state WHEN 'failed' THEN NEW.error END"
    " WHERE queue = NEW.queue AND job_id = NEW.id AND ended IS NULL; END",
    "CREATE TRIGGER IF NOT EXISTS workers_jobs_gone AFTER DELETE ON workers_jobs"
    " WHEN OLD.dependents AND OLD.expires_at IS NULL BEGIN UPDATE workers_dependencies SET ended = 'removed'"
    " WHERE queue = OLD.queue AND job_id = OLD.id AND ended IS NULL; END",
    "CREATE TRIGGER IF NOT EXISTS workers_jobs_waited AFTER UPDATE OF state ON workers_jobs"
    " WHEN OLD.state = 'waiting' AND NEW.state <> 'waiting' BEGIN"
    " DELETE FROM workers_dependencies WHERE dependent = OLD.seq; END",
    "CREATE TRIGGER IF NOT EXISTS workers_jobs_waited_gone AFTER DELETE ON workers_jobs"
    " WHEN OLD.state = 'waiting' BEGIN DELETE FROM workers_dependencies WHERE dependent = OLD.seq; END",
    "CREATE TRIGGER IF NOT EXISTS workers_jobs_follower_gone AFTER DELETE ON workers_jobs"
    " WHEN OLD.follows BEGIN DELETE FROM workers_outcomes WHERE queue = OLD.queue AND job_id = OLD.id; END",
)
_ONLY: Final = {"workers_events": "sqlite", "workers_told": "postgresql"}
_IN_CLAIM_ORDER: Final = frozenset({"workers_jobs_ready", "workers_jobs_ready_by_name", "workers_jobs_held"})

# An SQLite row id must be declared INTEGER; it still has 64 bits.
_Sequence = BigInteger().with_variant(Integer(), "sqlite")


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


def _in_each_queue(name: str, *items: SchemaItem) -> None:
    Table(name, metadata, Column("queue", Integer, primary_key=True, autoincrement=False), *items)


Table("workers_schema", metadata, Column("version", Integer, primary_key=True, autoincrement=False))

Table(
    "workers_queues",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("paused", Integer, nullable=False, server_default="0"),
)

Table(
    "workers_jobs",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("queue", Integer, nullable=False),
    Column("id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    # Times are milliseconds since 1970, UTC; durations milliseconds. run_at is also the place in the queue.
    Column("run_at", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("max_attempts", Integer, nullable=False),
    Column("stalls", Integer, nullable=False, server_default="0"),
    Column("uncounted", Integer, nullable=False, server_default="0"),
    Column("cancel_requested", Integer, nullable=False, server_default="0"),
    # NULL: the record vanishes in the step that settles the job.
    Column("keep_completed", BigInteger),
    Column("keep_failed", BigInteger),
    Column("ordering_key", Text),
    Column("backoff", Text),
    # The token outlives its claim, so that a repeated settle is recognised; recovery clears it.
    Column("token", LargeBinary),
    Column("worker", Text),
    Column("lease_until", BigInteger),
    Column("finished_at", BigInteger),
    Column("expires_at", BigInteger),
    Column("error", Text),
    Column("progress", LargeBinary),
    Column("chain_index", Integer, nullable=False, server_default="0"),
    # By simple and debounce: the key belongs to this job until the job has ended, or something removes it from the row.
    Column("deduplication_key", Text),
    Column("deduplication_mode", Text),
    # Whether other jobs may wait for this one; see workers_dependencies.
    Column("dependents", Integer, nullable=False, server_default="0"),
    # Whether there may be rows of it in workers_outcomes.
    Column("follows", Integer, nullable=False, server_default="0"),
    # JSON of names and texts; see `workers.metadata`.
    Column("meta", Text),
    # The attempts that failed; see `workers.storage.failures`.
    Column("failures", Text),
    Index("workers_jobs_by_id", "queue", "id", unique=True),
    _partial("workers_jobs_ready", "queue", "priority", "run_at", where="state = 'ready'"),
    _partial("workers_jobs_ready_by_name", "queue", "name", "priority", "run_at", where="state = 'ready'"),
    _partial("workers_jobs_delayed", "queue", "run_at", where="state IN ('scheduled', 'failing')"),
    _partial("workers_jobs_leases", "queue", "lease_until", where="state = 'processing'"),
    _partial("workers_jobs_finished", "queue", "state", "expires_at", where="expires_at IS NOT NULL"),
    _partial(
        "workers_jobs_busy_keys",
        "queue",
        "ordering_key",
        where="state = 'processing' AND ordering_key IS NOT NULL",
    ),
    _partial("workers_jobs_held", "queue", "ordering_key", "name", "priority", "run_at", where="state = 'held'"),
    _partial("workers_jobs_waiting", "queue", "run_at", where="state = 'waiting'"),
    _partial(
        "workers_jobs_by_deduplication_key",
        "queue",
        "deduplication_key",
        unique=True,
        where="deduplication_key IS NOT NULL AND expires_at IS NULL",
    ),
)

Table(
    "workers_payloads",
    metadata,
    Column("seq", _Sequence, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

# Keys by throttle, which stay taken whatever becomes of their job.
_in_each_queue(
    "workers_marks",
    Column("key", Text, primary_key=True),
    Column("job_id", Text, nullable=False),
    Column("until", BigInteger, nullable=False),
    Index("workers_marks_ending", "queue", "until"),
)

# The jobs that waiting ones still follow. `ended` is set, by SQLite's triggers, until the same transaction has dealt
# with it.
_in_each_queue(
    "workers_dependencies",
    Column("job_id", Text, primary_key=True),
    Column("dependent", _Sequence, primary_key=True, autoincrement=False),
    Column("fails", Integer, nullable=False),
    Column("ended", Text),
    Column("error", Text),
    Index("workers_dependencies_by_dependent", "dependent"),
    _partial("workers_dependencies_ended", "queue", where="ended IS NOT NULL"),
)

# How those ended that a job came after: copies, which go with the row of the job. `ended` is a state, or `removed`;
# `result` is NULL where it was too large to be copied.
_in_each_queue(
    "workers_outcomes",
    Column("job_id", Text, primary_key=True),
    Column("other_queue", Text, primary_key=True),
    Column("other_id", Text, primary_key=True),
    Column("ended", Text, nullable=False),
    Column("error", Text),
    Column("result", LargeBinary),
)

# See `steps/limits`: the limits of a queue, `gap` being the microseconds in which a bucket gets a token.
_in_each_queue(
    "workers_limits",
    Column("name", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("rate", Text),
    Column("burst", Integer),
    Column("concurrency", Integer),
    Column("gap", BigInteger),
    Column("capacity", Integer, nullable=False),
)

# Written by claims, and by declarations of limits. Times are microseconds since 1970: when the bucket is full, and when
# jobs that are held are looked at again. The front of a fair key is by name, everything else by the name ''.
_in_each_queue(
    "workers_gates",
    Column("gate", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("full_at", BigInteger),
    Column("opens_at", BigInteger),
    Column("front", _Sequence),
    _partial("workers_gates_opening", "queue", "opens_at", where="opens_at IS NOT NULL"),
    _partial("workers_gates_filling", "queue", "full_at", where="full_at IS NOT NULL"),
)

# See `crons`: what recurs. `due` is in milliseconds since 1970.
_in_each_queue(
    "workers_crons",
    Column("name", Text, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("due", BigInteger),
    Column("body", Text, nullable=False),
    _partial("workers_crons_due", "queue", "due", where="due IS NOT NULL"),
)

_in_each_queue(
    "workers_seen",
    Column("worker", Text, primary_key=True),
    Column("seen_at", BigInteger, nullable=False),
)

_in_each_queue(
    "workers_listeners",
    Column("process", Text, primary_key=True),
    Column("expires_at", BigInteger, nullable=False),
)

Table(
    "workers_events",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("queue", Integer, nullable=False),
    Column("process", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("job_id", Text, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("result", LargeBinary),
    # Numbers are never reused, even when all events were swept: readers remember how far they have read.
    sqlite_autoincrement=True,
)

# On PostgreSQL, what is told while a process is registered that cannot listen; see `postgres/driver/listener.py`.
Table(
    "workers_told",
    metadata,
    Column("seq", BigInteger, primary_key=True),
    Column("txid", BigInteger, nullable=False),
    Column("channel", Text, nullable=False),
    Column("payload", Text, nullable=False),
    Column("told_at", BigInteger, nullable=False),
    Index("workers_told_by_txid", "txid"),
    Index("workers_told_by_time", "told_at"),
)

_COLUMNS: Final = {
    "sqlite": "SELECT one.name, each.name FROM sqlite_master AS one, pragma_table_xinfo(one.name) AS each"
    " WHERE one.type = 'table' AND one.name GLOB 'workers_*'",
    "postgresql": "SELECT relname::text, attname::text FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid"
    " WHERE starts_with(relname, 'workers_') AND relkind IN ('r', 'p') AND pg_table_is_visible(pg_class.oid)"
    " AND attnum > 0 AND NOT attisdropped",
}


def migrate(connection: Connection) -> None:
    """Make the `workers_*` tables if they are missing, in the connection's transaction, which must be a writing one.

    Raises:
        StorageError: another version of this package made them.
    """
    if not _has_version(connection, _columns(connection)):
        if any(inspect(connection).has_table(name) for name in metadata.tables):
            raise _foreign()
        _create(connection)
        connection.execute(text("INSERT INTO workers_schema (version) VALUES (:version)"), {"version": VERSION})
    if connection.dialect.name == "postgresql":
        _create_functions(connection)
    else:
        for trigger in _TRIGGERS:
            connection.execute(text(trigger))


def check(connection: Connection) -> None:
    """Check that the tables are there, at this version, and whole. Nothing is changed.

    Raises:
        StorageError: they are missing or of another version, or some of them or of their columns were dropped.
    """
    columns = _columns(connection)
    if not _has_version(connection, columns):
        raise StorageError(
            "the database has no workers_* tables; make them once, as part of the application's upgrade: by"
            " `python -m workers migrate module:app`, or `await storage.migrate()`"
        )
    if lacking := _lacking(connection, columns):
        raise StorageError(
            f"the workers_* tables of version {VERSION} lack {', '.join(lacking)}; restore the database from a backup"
        )


def _lacking(connection: Connection, found: Mapping[str, set[str]]) -> list[str]:
    """Return each `table` or `table.column` of this version that the database lacks."""
    lacking = []
    for table in _tables(connection):
        if table.name not in found:
            lacking.append(table.name)
        else:
            lacking += [f"{table.name}.{each.name}" for each in table.columns if each.name not in found[table.name]]
    return lacking


def _columns(connection: Connection) -> dict[str, set[str]]:
    """Return the columns of each `workers_*` table that is there; SQLAlchemy's inspection takes ten times as long."""
    found: dict[str, set[str]] = {}
    for table, column in connection.exec_driver_sql(_COLUMNS[connection.dialect.name]):
        found.setdefault(table, set()).add(column)
    return found


def _tables(connection: Connection) -> list[Table]:
    name = connection.dialect.name
    return [table for table in metadata.sorted_tables if _ONLY.get(table.name, name) == name]


def _create(connection: Connection) -> None:
    # Not create_all: it makes a table's indexes in random order, by which SQLite's planner chooses between equal ones.
    for table in _tables(connection):
        _create_table(connection, table)


def _create_table(connection: Connection, table: Table) -> None:
    connection.execute(CreateTable(table))
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        connection.execute(CreateIndex(_with_seq(index) if connection.dialect.name == "postgresql" else index))


def _create_functions(connection: Connection) -> None:
    """Create the functions, or restore those that were dropped."""
    # By the driver itself, because there are many statements at once, with percent signs that are no parameters.
    with closing(connection.connection.cursor()) as cursor:
        for name in _FUNCTIONS:
            cursor.execute(resources.files(__package__).joinpath(name).read_text())


def _with_seq(index: Index) -> Index:
    """Add the row's number to the end of the index, where equal times have to stay in order."""
    if index.name not in _IN_CLAIM_ORDER:
        return index
    table = index.table
    assert table is not None
    columns = [*index.columns, table.c.seq]
    copy = Table(table.name, MetaData(), *(Column(column.name, column.type) for column in columns))
    return Index(index.name, *copy.c, postgresql_where=index.dialect_options["postgresql"]["where"])


def _has_version(connection: Connection, columns: Mapping[str, set[str]]) -> bool:
    """Tell whether the tables are there. Raise an error if they are not of this version."""
    if "workers_schema" not in columns:
        return False
    if columns["workers_schema"] != {"version"}:
        raise _foreign()
    found = connection.execute(text("SELECT max(version) FROM workers_schema")).scalar()
    if not isinstance(found, int | None):
        raise _foreign()
    if found not in (None, VERSION):
        raise _of_version(found)
    return found is not None


def _foreign() -> StorageError:
    return StorageError("the database has tables of somebody else's by the name of workers_*; use a database without")


def _of_version(found: int) -> StorageError:
    todo = "upgrade it before it runs here"
    if found < VERSION:
        todo = "let a package of that version finish their jobs, then drop them or use another database"
    return StorageError(f"the workers_* tables have version {found}, this package knows {VERSION}: {todo}")
