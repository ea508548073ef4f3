"""Whether a database and a queue answer, found out before anything is asked of them, in seconds and not in minutes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from db import Database
from db.migrate import SchemaVersion, schema_version
from federation.base.errors import ConfigurationError, Unreachable
from workers import Queue, StorageUnavailable

PATIENCE: Final = timedelta(seconds=8)


async def schema_of(database: Database) -> SchemaVersion:
    """Which migration the database has reached.

    Raises:
        Unreachable: it does not answer, or refuses us.
    """
    async with _answering("the database", "DATABASE_URL"), database.read() as session:
        connection = await session.connection()
        return await connection.run_sync(schema_version)


async def require_schema(database: Database) -> None:
    """The database answers and has this version's tables.

    Raises:
        Unreachable: it does not answer, or refuses us.
        ConfigurationError: it has not been upgraded.
    """
    version = await schema_of(database)
    if version.is_behind:
        raise ConfigurationError([f"DATABASE_URL: {behind(version)}"])


def behind(version: SchemaVersion) -> str:
    """What a database that is behind lacks, and what to do."""
    at = f"is at migration {version.current}" if version.current else "has none of our tables"
    return f"the database {at}, this version needs {version.expected}; run `federation upgrade`"


async def connect(queue: Queue) -> None:
    """The queue answers and is ready to be asked.

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
        # Never its text: a driver's may quote the URL, and with it a password.
        why = type(error.__cause__ or error).__name__
        raise Unreachable(f"{what} cannot be used ({why}); is {setting} right, and the server up?") from error
