"""Bring a database to the schema this version of the code expects.

Alembic is imported by `upgrade` alone: it costs a third of the time a process takes to start, and every process asks
which version the database has.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import URL, Connection, String, column, func, inspect, select, table, text
from sqlalchemy.exc import DBAPIError

from db.engines import migration_engine, reading_engine
from db.host import create_host_tables
from db.url import absent_file, parse_url

if TYPE_CHECKING:
    from alembic.config import Config

# "fedd" in ASCII. Any constant works, as long as every version of this program takes the same lock.
_ADVISORY_LOCK = 0x66656464

# Alembic keeps the running migration in module globals: two threads, even on two databases, would mix them up.
_one_at_a_time = threading.Lock()

VERSION_TABLE = "federation_alembic_version"
"""A host application may keep its own Alembic history in the same database."""

_FIRST: Final = "0100"
"""The migration of 1.0, from which on every version upgrades the databases of those before it; theirs had smaller
numbers."""

_MIGRATIONS: Final = Path(__file__).parent / "migrations"
_CURRENT: Final = select(func.max(column("version_num", String))).select_from(table(VERSION_TABLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaVersion:
    """Which migration a database has reached (None: none of ours), and which this version of the code expects."""

    current: str | None
    expected: str

    @property
    def is_behind(self) -> bool:
        """Tell whether tables or columns of this version are missing; a newer version's database has them all."""
        return self.current is None or self.current < self.expected  # revisions are numbers of four digits

    @property
    def is_unpublished(self) -> bool:
        """Tell whether it is of a version before the first release, whose databases none upgrades."""
        return self.current is not None and self.current < _FIRST

    @property
    def remedy(self) -> str:
        """What to do about a database that is behind."""
        if self.is_unpublished:
            return "send what it owes with the version that made it, then set DATABASE_URL to a new database"
        return "run `federation upgrade`"


def upgrade(url: str, *, host_tables: bool = False) -> tuple[str, ...]:
    """Give the database every table, column and index of this version; existing rows and columns are untouched.

    With `host_tables` make `user`, `posts` and `blocks` as well, where they are missing; return those that were made.

    Creates what an empty database lacks and adopts the tables of an existing node. All in one transaction, under a lock
    that lets one process migrate while others wait (30 s at most on SQLite) and then find nothing to do. Blocking; from
    async code use `asyncio.to_thread(upgrade, url)`. An SQLite file that is made is its owner's alone (0600).

    Raises:
        DatabaseUrlError: see `Database`.
        alembic.util.CommandError: the database was migrated by a newer version of this program, or by one before 1.0.
        HostTablesError: tables of the host's own are in the way of `host_tables`; nothing was changed.
    """
    from alembic import command

    _make_private(absent_file(url))
    engine = migration_engine(parse_url(url))
    try:
        with _one_at_a_time, engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            _refuse_unpublished(connection)
            command.upgrade(_config(connection), "head")
            return create_host_tables(connection) if host_tables else ()
    finally:
        engine.dispose()


def _refuse_unpublished(connection: Connection) -> None:
    from alembic.util import CommandError

    version = schema_version(connection)
    if version.is_unpublished:
        raise CommandError(
            f"the database is at migration {version.current}, which is of a version before 1.0, and cannot be upgraded;"
            f" nothing was changed: {version.remedy}"
        )


def _make_private(file: Path | None) -> None:
    """Make the file readable by its owner alone; SQLite gives the files that it puts beside it the same mode.

    This is done before SQLite opens it, because closing a file drops this process's locks on it.
    """
    with suppress(OSError):  # SQLite tells what is wrong, or somebody was faster
        if file is not None:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode=0o600))


def is_blank(file: Path) -> bool:
    """Tell whether the SQLite file is missing or empty, for example because making it was interrupted.

    False for a file that is no database. Nothing is written.
    """
    if not file.exists() or not file.stat().st_size:
        return True
    engine = reading_engine(URL.create("sqlite", database=str(file)))
    try:
        with engine.connect() as connection:
            return not connection.execute(text("SELECT 1 FROM sqlite_master LIMIT 1")).all()
    except DBAPIError:
        return False
    finally:
        engine.dispose()


def schema_version(connection: Connection) -> SchemaVersion:
    """Return what `connection`'s database has been migrated to; nothing is written."""
    has_one = inspect(connection).has_table(VERSION_TABLE)
    current: str | None = connection.execute(_CURRENT).scalar() if has_one else None
    return SchemaVersion(current=current, expected=_head())


@cache
def _head() -> str:
    """Return the youngest migration: the files are `vNNNN_name.py`, and NNNN is the revision."""
    return max(file.name[1:5] for file in (_MIGRATIONS / "versions").glob("v[0-9]*.py"))


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
