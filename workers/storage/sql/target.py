"""The database that a URL or an engine names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from sqlalchemy import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine

from workers.errors import StorageError, Unsupported
from workers.storage.base import Capabilities
from workers.storage.sql.database import Database
from workers.storage.sql.sqlite.database import SqliteTarget


class Target(Protocol):
    """The database that a storage is on, before anybody connects."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def url(self) -> str:
        """Its URL without user, password and options."""

    @property
    def connections(self) -> int:
        """How many connections of a server's a process opens at most; 0 for a file."""

    def acquire(self) -> Database:
        """Return this process's database, counting one more user; each must `release` it."""

    def async_engine(self) -> AsyncEngine:
        """Make an engine on the database, to be disposed of; on SQLite its transactions begin with the write lock."""

    def adopt(self, engine: AsyncEngine) -> AsyncEngine:
        """Return the caller's engine, prepared for sessions that may be cancelled at any moment."""

    def migrate(self, make_tables: Callable[[Connection], None]) -> None:
        """Run `make_tables` in one transaction, and nowhere else at the same time; blocks."""


def parse_target(target: str | URL | Engine | AsyncEngine, busy_timeout: timedelta) -> Target:
    """Return the database that a URL names, or the URL of an engine.

    Raises:
        StorageError: the URL is malformed, or names no SQLite file.
        Unsupported: it is another database than these.
    """
    try:
        url = target.url if isinstance(target, (Engine, AsyncEngine)) else make_url(target)
    except (ArgumentError, ValueError):
        # Not chained: SQLAlchemy quotes the whole string, password included.
        raise StorageError("the storage's URL cannot be parsed; write sqlite:///path/to/jobs.db") from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        return SqliteTarget.of(url, busy_timeout)
    if backend == "postgresql":
        # Its driver is an extra of its own.
        from workers.storage.sql.postgres.target import PostgresTarget

        return PostgresTarget.of(url, busy_timeout, checked=isinstance(target, str))
    raise Unsupported(f"SqlStorage speaks SQLite (sqlite:///path/to/jobs.db) and postgresql://..., not {backend}")
