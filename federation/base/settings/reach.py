"""Check within seconds that a database and a queue answer, before anything uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, delete, false, func, select
from sqlalchemy.exc import SQLAlchemyError

from db import Database, FederationTable, ServerLink
from db.catalog import missing
from db.errors import local_cause, why_not_written
from db.host import missing_of_host
from db.migrate import SchemaVersion, schema_version
from federation.base.errors import ConfigurationError, Unreachable
from workers.errors import StorageUnavailable

if TYPE_CHECKING:
    from workers import Queue

PATIENCE: Final = timedelta(seconds=5)
"""How long to wait for an answer. With the start and end of a command this makes less than ten seconds."""
MOST_NAMED: Final = 8
HOST_ADVICE: Final = "run the host's migrations; where there is no host, `federation upgrade --host-tables`"
"""What to do about missing tables and columns of the host application."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """How far a database has been migrated, and which of our tables and columns it lacks nevertheless."""

    version: SchemaVersion
    missing: tuple[str, ...]

    @property
    def problem(self) -> str | None:
        """What is wrong with the tables and what to do; None if this version can work with them."""
        if self.version.is_behind:
            return _behind(self.version)
        if self.missing:
            return _incomplete(self.missing)
        return None


async def schema_of(database: Database) -> Schema:
    """Return what the database has of our tables, according to its own catalog.

    Raises:
        Unreachable: it does not answer, or refuses us.
    """
    async with _answering("the database", "DATABASE_URL"), database.read() as session:
        connection = await session.connection()
        return await connection.run_sync(_look)


async def require_schema(database: Database) -> None:
    """Check that the database answers and has this version's tables.

    Raises:
        Unreachable: it does not answer, or refuses us.
        ConfigurationError: it has not been upgraded, or lacks what an upgrade had made.
    """
    problem = (await schema_of(database)).problem
    if problem is not None:
        raise ConfigurationError([f"DATABASE_URL: {problem}"])


async def write_problem(database: Database) -> str | None:
    """Write what changes no row. Return why the database does not take that, in words that name no place, or None."""
    try:
        await database.transact(_rewrite_file if database.is_sqlite else _rewrite_server)
    except SQLAlchemyError as error:
        return why_not_written(error)
    return None


async def missing_host_tables(database: Database) -> tuple[str, ...]:
    """Return which tables and columns of the host application the database lacks.

    Only those count that the inbound side and `publish_post` use.

    Raises:
        Unreachable: it does not answer, or refuses us.
    """
    async with _answering("the database", "DATABASE_URL"), database.read() as session:
        connection = await session.connection()
        return await connection.run_sync(missing_of_host)


def host_lacks(names: Sequence[str]) -> str:
    """Say the same in words; HOST_ADVICE says what to do about it."""
    return f"the database lacks the host application's {enumerated(names)}"


async def gaps(database: Database) -> tuple[str, ...]:
    """Return each table and column that the database lacks, ours and the host's: why a statement may have been refused.

    Raises:
        Unreachable: it does not answer, or refuses us.
    """
    async with _answering("the database", "DATABASE_URL"), database.read() as session:
        connection = await session.connection()
        return await connection.run_sync(lambda each: (*_look(each).missing, *missing_of_host(each)))


def _rewrite_file(connection: Connection) -> None:
    """Write a number of the file's header as it is: a statement that finds no row needs no room on the disk."""
    number = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    connection.exec_driver_sql(f"PRAGMA user_version = {int(number)}")


def _rewrite_server(connection: Connection) -> None:
    """Ask for the right and the lock by a statement that finds no row, and for a commit that reaches the disk."""
    connection.execute(delete(ServerLink).where(false()))
    connection.execute(select(func.txid_current()))


def _look(connection: Connection) -> Schema:
    return Schema(version=schema_version(connection), missing=missing(connection, FederationTable.metadata))


def _behind(version: SchemaVersion) -> str:
    at = f"is at migration {version.current}" if version.current else "has none of our tables"
    old = " and upgrades none of before 1.0" if version.is_unpublished else ""
    return f"the database {at}, this version needs {version.expected}{old}; {version.remedy}"


def _incomplete(names: Sequence[str]) -> str:
    return (
        f"the database lacks {enumerated(names)}, which `federation upgrade` had made and does not make again:"
        " somebody took it away; restore the database from a backup"
    )


def enumerated(names: Sequence[str]) -> str:
    """List tables and columns for people, the first few by name."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


async def connect(queue: Queue) -> None:
    """Start the queue, once it answers.

    Raises:
        Unreachable: it does not answer.
        StorageError: it answers that it cannot serve us.
    """
    async with _answering(f"the queue {queue.storage.queue}", "REDIS_URL or QUEUE_URL"):
        await queue.start()


@asynccontextmanager
async def _answering(what: str, setting: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(PATIENCE.total_seconds()):
            yield
    except TimeoutError:
        seconds = round(PATIENCE.total_seconds())
        raise Unreachable(f"{what} did not answer within {seconds} s; is {setting} right, and the server up?") from None
    except (SQLAlchemyError, StorageUnavailable, OSError) as error:
        # The error's text is never used: a driver may quote the URL in it, and with it a password.
        if isinstance(error, SQLAlchemyError) and (cause := local_cause(error)):
            raise Unreachable(f"{what} cannot be used: {cause} ({setting})") from error
        why = type(error.__cause__ or error).__name__
        raise Unreachable(f"{what} cannot be used ({why}); is {setting} right, and the server up?") from error
