"""The settings of our own sessions on a PostgreSQL database.

Theory of operation. A server, a database and a role have settings of their own, and some change what our statements
mean. Those are set by a statement when a session begins: PgBouncer refuses them as options of the start. A caller's
session is not ours to set. So nothing that goes there depends on its settings, see `direct.PostgresJoined`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, TypeAlias

import psycopg
from sqlalchemy import Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection

from workers.storage.sql.postgres.silence import OwnConnection

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
