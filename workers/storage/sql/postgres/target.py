"""The PostgreSQL database that a URL names, before anybody connects, and how its connections are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from workers.errors import StorageError
from workers.homes import ForkLock
from workers.storage.base import Capabilities
from workers.storage.sql.errors import translate
from workers.storage.sql.postgres.database import PATIENT, PROMPT, PostgresDatabase
from workers.storage.sql.postgres.driver.listener import LOOKS_EACH
from workers.storage.sql.postgres.driver.silence import OwnConnection, Patience
from workers.storage.sql.postgres.session import (
    LentSessions,
    OwnSessions,
    limit_waiting,
    on_connect,
    refuse_lent_sessions,
)

_NOTIFY: Final = "notify"
_PATIENT: Final[Mapping[str, object]] = {
    "connect_timeout": 6,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
"""What libpq and the kernel do about a server that is gone, unless the URL says otherwise."""
_SESSIONS: Final = 10
_MIGRATION_LOCK: Final = 8_317_402_561  # any number that nobody else locks

_LOCK = text("SELECT pg_advisory_xact_lock(:key)")
_ENCODING = text("SHOW server_encoding")

_lock = ForkLock()
# The key has the process: a fork's copies are of no use in the child, and closing them there would do harm.
_databases: dict[tuple[int, PostgresTarget], PostgresDatabase] = {}


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """A PostgreSQL database, as a URL names it."""

    full_url: URL
    busy_timeout: timedelta
    notify: bool = True
    """Whether a session is a client's own, so that it may listen; not behind a pool that lends them."""

    connections: ClassVar[int] = PROMPT + PATIENT + 1  # and the listener's

    @classmethod
    def of(cls, url: URL, busy_timeout: timedelta, *, checked: bool) -> PostgresTarget:
        """Read the URL; it is to be `checked` unless an engine has it.

        Raises:
            StorageError: it has a parameter that nobody knows.
        """
        url, notify = _read_notify(url)
        if checked:
            _check_parameters(url)
        return cls(url, busy_timeout, notify)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            clock="server",
            durable=True,
            processes="many",
            transactions=True,
            dependencies_across_queues=True,
            limit_keys=True,
            crons=True,
            farewells=True,
            ordered_listing=True,
            outside_continuations=True,
            held_wake_ups=self.notify,
            wakeup_latency=timedelta(0) if self.notify else LOOKS_EACH,
        )

    @property
    def url(self) -> str:
        shown = URL.create("postgresql", host=self.full_url.host, port=self.full_url.port)
        return shown.set(database=self.full_url.database).render_as_string()

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"PostgreSQL database {self.url!r}"

    def acquire(self) -> PostgresDatabase:
        with _lock:
            key = (os.getpid(), self)
            database = _databases.get(key)
            if database is None:
                database = _databases[key] = PostgresDatabase(self)
            database.users += 1
            return database

    def forget(self, database: PostgresDatabase) -> bool:
        """Count one user of the database less; tell whether that was the last."""
        with _lock:
            database.users -= 1
            if database.users:
                return False
            for key, other in list(_databases.items()):
                if other is database:
                    del _databases[key]
            return True

    def migrate(self, make_tables: Callable[[Connection], None]) -> None:
        engine = self.engine()
        try:
            with engine.begin() as connection:
                # This migration may take as long as it needs; others wait for it.
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(_LOCK, {"key": _MIGRATION_LOCK})
                if connection.execute(_ENCODING).scalar_one() != "UTF8":
                    raise StorageError(f"{self.name} is not encoded in UTF8; create it with ENCODING 'UTF8'")
                make_tables(connection)
        except DBAPIError as error:
            raise translate(error, self.name) from error
        finally:
            engine.dispose()

    def sessions(self, patience: Patience) -> OwnSessions:
        """Return what gives our own sessions their settings."""
        if not self.notify:
            return LentSessions(self.busy_timeout)
        opening = self._opening(patience)
        return OwnSessions(self.busy_timeout, lambda found: refuse_lent_sessions(found, opening, self.name))

    def engine(self, sessions: OwnSessions | None = None, patience: Patience | None = None) -> Engine:
        """Make an engine without a pool, whose errors quote no values; without `patience` it waits for ever."""
        patience = patience or Patience.endless()
        engine = create_engine(
            self._psycopg_url, hide_parameters=True, poolclass=NullPool, creator=self._opening(patience)
        )
        on_connect(engine, (sessions or self.sessions(patience)).begin)
        return engine

    def async_engine(self) -> AsyncEngine:
        """Make an engine for handlers, whose sessions are as any of theirs but for the time that they wait."""
        engine = create_async_engine(
            self._psycopg_url,
            hide_parameters=True,
            pool_size=_SESSIONS,
            max_overflow=0,
            pool_timeout=self.busy_timeout.total_seconds(),
            pool_pre_ping=True,
            connect_args=_driver_arguments(self.full_url, notify=self.notify),
        )
        if self.notify:  # else the session is the next client's, too
            on_connect(engine.sync_engine, partial(limit_waiting, lock_timeout=self.busy_timeout))
        return engine

    def adopt(self, engine: AsyncEngine) -> AsyncEngine:
        return engine

    def listening_connection(self, sessions: OwnSessions, patience: Patience) -> OwnConnection:
        """Open a connection of its own, outside transactions."""
        connection = self._opening(patience, application_name="workers listener", autocommit=True)()
        sessions.begin(connection)
        return connection

    def _opening(self, patience: Patience, **more: Any) -> Callable[[], OwnConnection]:  # what psycopg takes
        return partial(_connect, self._psycopg_url, patience, notify=self.notify, **more)

    @property
    def _psycopg_url(self) -> URL:
        return self.full_url.set(drivername="postgresql+psycopg")


def _read_notify(url: URL) -> tuple[URL, bool]:
    """Return the URL as libpq has it, and whether the server may be listened to: not with `notify=off`.

    Raises:
        StorageError: `notify` is something else.
    """
    said = url.query.get(_NOTIFY, "on")
    if said not in ("on", "off"):
        raise StorageError("`notify` in the URL of a PostgreSQL database is `on` or `off`")
    return url.difference_update_query([_NOTIFY]), said == "on"


def _check_parameters(url: URL) -> None:
    """Accept a URL whose parameters libpq knows, which would else be an error of each connection.

    Raises:
        StorageError: it has another one.
    """
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    unknown = sorted(url.query.keys() - known)
    if unknown:
        raise StorageError(f"the URL of a PostgreSQL database has no parameter {unknown[0][:40]!r}")


def _driver_arguments(url: URL, *, notify: bool) -> dict[str, Any]:  # what psycopg takes
    """Return what psycopg is told beside what the URL says; what is prepared belongs to a session."""
    ours = {name: value for name, value in _PATIENT.items() if name not in url.query}
    return {**ours, "client_encoding": "UTF8", **({} if notify else {"prepare_threshold": None})}


def _connect(url: URL, patience: Patience, *, notify: bool, **more: Any) -> OwnConnection:  # what psycopg takes
    """Open a connection of our own."""
    arguments, said = url.get_dialect()().create_connect_args(url)
    return patience.connect(*arguments, **{**said, **_driver_arguments(url, notify=notify), **more})
