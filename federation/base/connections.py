"""Whether the database admits the connections of as many processes as somebody wants to run."""

from __future__ import annotations

from db import Database
from db.engines import POSTGRES_CONNECTIONS
from federation.base.errors import ConfigurationError
from workers.storage.abilities import Admission, Pooled
from workers.storage.base import Storage
from workers.storage.sql import admission


async def require_connections(database: Database, queue: Storage, *, processes: int) -> None:
    """Check that `processes` can have all connections that their pools may open, to the database and to the queue.

    Other processes, such as the inbound side, are not counted: nobody here knows how many there are.

    Raises:
        ConfigurationError: a server admits fewer; the message has the arithmetic.
        SQLAlchemyError, StorageUnavailable: one did not answer.
    """
    pooled = queue if isinstance(queue, Pooled) and queue.connections else None
    if not database.is_sqlite:
        async with database.read() as session:
            found = await (await session.connection()).run_sync(admission)
        each = POSTGRES_CONNECTIONS + (pooled.connections if pooled is not None else 0)
        _require("DATABASE_URL", found, processes, each)
    elif pooled is not None:
        _require("QUEUE_URL", await pooled.admission(), processes, pooled.connections)


def _require(variable: str, found: Admission, processes: int, each: int) -> None:
    shortage = found.shortage(processes, each=each)
    if shortage is not None:
        raise ConfigurationError([f"--processes {processes}, {variable}: {shortage}"])
