"""Find out which database somebody else's connection is on, whatever name and address it was reached by."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final, TypeAlias
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, text

from db.engines import reading_engine

Identity: TypeAlias = tuple[object, ...]

_FILES: Final = text("PRAGMA database_list")
_WHICH: Final = text(
    "SELECT system_identifier, oid FROM pg_control_system(), pg_database WHERE datname = current_database()"
)


class ForeignDatabase(ValueError):
    """The session or connection is on another database than the one its statements are for; nothing was written."""


class OwnDatabase:
    """Tells connections to the database of `url` from others; safe from any thread.

    An engine is looked at once: all its connections are taken to be on one database.
    """

    def __init__(self, url: URL) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._identity: Identity | None = None
        self._known: WeakSet[Engine] = WeakSet()

    @property
    def name(self) -> str:
        """Return what messages call it; never a password."""
        shown = URL.create(
            self._url.get_backend_name(), host=self._url.host, port=self._url.port, database=self._url.database
        )
        return shown.render_as_string()

    def trust(self, engine: Engine) -> None:
        """Take connections of the engine to be on this database, without a look."""
        self._known.add(engine)

    def needs_a_look(self, engine: Engine) -> bool:
        """Tell whether `check` would have to learn first. An event loop should not wait for that."""
        return engine not in self._known and self._identity is None

    def learn(self) -> None:
        """Find out what to compare by. On PostgreSQL that takes a connection of its own, the first time."""
        with self._lock:
            if self._identity is None:
                self._identity = self._look()

    def check(self, connection: Connection) -> None:
        """Refuse a connection to another database. It may take a query in the caller's transaction.

        Raises:
            ForeignDatabase: it is not.
        """
        if connection.engine in self._known:
            return
        self.learn()
        if connection.dialect.name != self._url.get_backend_name() or _identity(connection) != self._identity:
            raise ForeignDatabase(
                f"this session is on another database, {_shown(connection)}; deliveries are owed in {self.name}"
                " (DATABASE_URL): pass a session on that one"
            )
        self._known.add(connection.engine)

    def _look(self) -> Identity:
        if self._url.get_backend_name() == "sqlite":
            return _file(self._url.database or "")
        engine = reading_engine(self._url, at_leisure=False)
        try:
            with engine.connect() as connection:
                return _identity(connection)
        finally:
            engine.dispose()


def _identity(connection: Connection) -> Identity:
    if connection.dialect.name == "sqlite":
        return _file(next(row.file for row in connection.execute(_FILES) if row.name == "main"))
    return tuple(connection.execute(_WHICH).one())


def _file(path: str) -> Identity:
    """Return one spelling for each file. Its inode would not do: another file may be put in its place."""
    return ("file", str(Path(path).resolve()) if path else "")


def _shown(connection: Connection) -> str:
    url = connection.engine.url
    return URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database).render_as_string()
