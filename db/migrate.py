"""Bring a database to the schema this version of the code expects."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from db.engines import migration_engine
from db.url import parse_url

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


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
