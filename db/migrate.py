"""Bring a database to the schema this version of the code expects."""

from __future__ import annotations

import asyncio
import threading
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from db.engines import migration_engine
from db.session import Database
from db.url import parse_url

VERSION_TABLE = "federation_alembic_version"
"""Alembic's; a host application may keep its own history in the same database."""

# "fedd" in ASCII. Any constant works, as long as every version of this program takes the same lock.
_ADVISORY_LOCK = 0x66656464

# Alembic keeps the running migration in module globals: two threads, even on two databases, would mix them up.
_one_at_a_time = threading.Lock()


def upgrade(url: str) -> None:
    """The database has every table, column and index of this version; existing rows and columns are untouched.

    Creates what an empty database lacks and adopts the tables of an existing node. All in one transaction, under a lock
    that lets one process migrate while others wait (30 s at most on SQLite) and then find nothing to do. Blocking; from
    async code use `asyncio.to_thread(upgrade, url)`.

    Raises:
        DatabaseUrlError: see `Database`.
        alembic.util.CommandError: the database was migrated by a newer version of this program.
    """
    engine = migration_engine(parse_url(url))
    try:
        with _one_at_a_time, engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            command.upgrade(_config(connection), "head")
    finally:
        engine.dispose()


async def is_behind(database: Database) -> bool:
    """Whether `upgrade` has something to do. A database that a newer version migrated is not behind.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    async with database.read() as session:
        connection = await session.connection()
        applied = await connection.run_sync(lambda plain: _applied(plain))
    earlier, head = await asyncio.to_thread(_known_revisions)
    return applied is None or (applied != head and applied in earlier)


def _applied(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()  # noqa: S608 - ours


@cache
def _known_revisions() -> tuple[frozenset[str], str | None]:
    """All revisions of this version of the program, and the last of them."""
    with _one_at_a_time:
        scripts = ScriptDirectory.from_config(_config())
        return frozenset(script.revision for script in scripts.walk_revisions()), scripts.get_current_head()


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
