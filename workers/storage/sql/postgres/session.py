"""The settings of our own sessions on a PostgreSQL database.

Theory of operation. A server, a database and a role have settings of their own, and some change what our statements
mean. Those are set by a statement when a session begins: PgBouncer refuses them as options of the start. A caller's
session is not ours to set. So nothing that goes there depends on its settings, see `driver.direct.PostgresJoined`.

A pool may stand between us and the server that lends its sessions for single transactions. Such a pool (PgBouncer's
`pool_mode = transaction`) takes LISTEN, and what it is told by SET or PREPARE, for another client's session: wake-ups
never come, and limits are others'. It does not say what it is. But the number of the server's process that a client is
told at the start is the pool's own there. Then two connections find out: one that has a session keeps its process, and
nobody else has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias

import psycopg
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.engine.interfaces import DBAPIConnection

from workers.errors import StorageError
from workers.storage.sql.direct import Executor
from workers.storage.sql.postgres.driver.silence import OwnConnection

Session: TypeAlias = "psycopg.Connection[tuple[object, ...]] | DBAPIConnection"

_WAIT: Final = "set_config('lock_timeout', %(milliseconds)s, %(local)s)"
_FIX: Final = (
    "set_config('array_nulls', 'on', %(local)s),"  # else NULL in an array is a text of four letters
    # A transaction of a connection that has gone silent must not hold its locks until the server's kernel notices.
    " set_config('idle_in_transaction_session_timeout', '60s', %(local)s),"
    " set_config('search_path', coalesce(%(path)s, current_setting('search_path')), %(local)s)"
)
_ISOLATE: Final = "set_config('default_transaction_isolation', 'read committed', false)"


class OwnSessions:
    """The sessions of one process on a database; all of them find the tables that the first one has found.

    The first one is checked by `check`.
    """

    def __init__(self, lock_timeout: timedelta, check: Callable[[OwnConnection], None] = lambda _: None) -> None:
        self._lock_timeout = lock_timeout
        self._check = check
        self._checked = False
        self._search_path: str | None = None

    def begin(self, connection: Session) -> None:
        """Give a new session its settings.

        Raises:
            StorageError: it is not ours alone.
        """
        self._search_path = str(_set(connection, f"{_ISOLATE}, {_WAIT}, {_FIX}", self._values(local=False))[-1])
        if not self._checked and isinstance(connection, OwnConnection):
            try:
                self._check(connection)
            except BaseException:
                connection.close()  # nobody else knows it yet
                raise
            self._checked = True

    def begin_transaction(self, connection: OwnConnection) -> None:
        """Do nothing: the session has its settings."""

    def _values(self, *, local: bool) -> dict[str, object]:
        return {**_limit(self._lock_timeout), "path": self._search_path, "local": local}


class LentSessions(OwnSessions):
    """Sessions that a pool lends for single transactions, each of which gets its settings anew."""

    def begin(self, connection: Session) -> None:
        """Let its transactions be as ours are."""
        assert isinstance(connection, OwnConnection)
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED

    def begin_transaction(self, connection: OwnConnection) -> None:
        """Give the transaction its settings."""
        row = connection.execute(f"SELECT {_WAIT}, {_FIX}".encode(), self._values(local=True)).fetchone()
        assert row is not None
        self._search_path = str(row[-1])


def limit_waiting(connection: Session, lock_timeout: timedelta) -> None:
    """Let a new session wait no longer than that for a lock."""
    _set(connection, _WAIT, {**_limit(lock_timeout), "local": False})


def on_connect(engine: Engine, begin: Callable[[DBAPIConnection], None]) -> None:
    """Let `begin` see every new session of the engine."""
    event.listen(engine, "connect", lambda connection, _record: begin(connection))


def _limit(lock_timeout: timedelta) -> dict[str, object]:
    return {"milliseconds": str(lock_timeout // timedelta(milliseconds=1))}


def _set(connection: Session, settings: str, values: Mapping[str, object]) -> tuple[object, ...]:
    try:
        cursor = connection.cursor()
        cursor.execute(f"SELECT {settings}".encode(), values)
        found = cursor.fetchone()
        cursor.close()
        connection.commit()  # a rollback would undo what was set
    except BaseException:
        connection.close()  # nobody else knows it yet
        raise
    assert found is not None
    return tuple(found)


_PLACE: Final = text(
    "SELECT system_identifier, d.oid, (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('workers_queues')),"
    " current_setting('client_encoding') <> 'SQL_ASCII'"
    " FROM pg_control_system(), pg_database d WHERE datname = current_database()"
)


@dataclass(frozen=True, slots=True)
class Place:
    """The database and its server, whatever their address; where the tables are that it finds; how it has texts."""

    database: tuple[object, object]
    schema: object
    is_encoded: bool


def place_of(connection: Executor) -> Place:
    """Ask what the session works on."""
    system, database, schema, is_encoded = connection.execute(_PLACE).one()
    return Place((system, database), schema, is_encoded)


def check(connection: Connection, ours: Place, database: str) -> None:
    """Refuse a caller's connection whose jobs would go elsewhere than ours, or be other ones.

    Raises:
        StorageError: see there.
    """
    theirs = place_of(connection) if connection.dialect.name == "postgresql" else None
    if theirs is None or theirs.database != ours.database:
        raise StorageError(f"`connection` belongs to another database than the jobs; pass one of {database}")
    if theirs.schema != ours.schema:
        raise StorageError(f"`connection` does not find the tables of {database}; its `search_path` leads elsewhere")
    if not theirs.is_encoded:
        raise StorageError("`connection` has `client_encoding = SQL_ASCII`, in which texts are bytes; set it to UTF8")


_ROUNDS: Final = 4
"""Others may use the pool at the same time, and get in between. Psycopg prepares what is asked more than five times."""
_NO_TRANSACTIONS: Final = "transaction blocks not allowed"
"""PgBouncer says so with the code that it has for outages, too."""
_PROCESS: Final = "SELECT pg_backend_pid()"
_SAID: Final = (
    "is behind a pool that lends its sessions for single transactions, as PgBouncer does with `pool_mode ="
    " transaction`: wake-ups would get lost there; use one with `pool_mode = session`, or add `notify=off` to the URL"
)


def refuse_lent_sessions(connection: OwnConnection, connect: Callable[[], OwnConnection], database: str) -> None:
    """Refuse a server whose sessions are no client's own; nothing is asked of one that no pool is in front of.

    Raises:
        StorageError: it is such a one.
    """
    process = _process(connection)
    connection.commit()
    if process != connection.info.backend_pid and _are_lent(process, connection, connect):
        raise StorageError(f"{database} {_SAID}")


def _are_lent(process: int, connection: OwnConnection, connect: Callable[[], OwnConnection]) -> bool:
    """Find out with a second connection; the process is the one that the first has had."""
    was = connection.autocommit
    with connect() as other:
        other.autocommit = connection.autocommit = False
        try:
            return _are_shared(process, connection, other)
        except psycopg.errors.ProtocolViolation as error:
            if (error.diag.message_primary or "").startswith(_NO_TRANSACTIONS):  # it lends for single statements
                return True
            raise
        finally:
            if not connection.closed:
                connection.rollback()
                connection.autocommit = was


def _are_shared(process: int, connection: OwnConnection, other: OwnConnection) -> bool:
    """Tell whether one has ever had another process than at first, or one that the other has had.

    Each round counts with those before. A pool lends what came back last, or what came back first, and other clients
    may have put those two into an order in which each gets its own again: so they are given back in both orders.
    """
    held = None
    for number in range(_ROUNDS):
        before, held = held, _process(other)
        has_changed = process != _process(connection) or before not in (None, held)
        for each in (other, connection) if number % 2 == 0 else (connection, other):
            each.rollback()
        if has_changed or held == process:
            return True
    return False


def _process(connection: OwnConnection) -> int:
    row = connection.execute(_PROCESS).fetchone()
    assert row is not None
    return int(str(row[0]))
