"""Counts what a node asks of its database and its queues: statements of a process, and commands of a Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from psycopg import AsyncConnection, AsyncCursor
from redis.asyncio import Redis
from sqlalchemy import Connection, Engine, Pool, event
from sqlalchemy.engine.interfaces import DBAPIConnection

from federation.base.logs import configure_logging
from federation.base.settings.settings import Settings
from federation.run import run

QUEUE_TABLES = "workers_"


@dataclass(slots=True)
class Statements:
    """Statements, once for each set of parameters: `of_queues` those on the queues' tables, `executions` all others."""

    executions: int = 0
    of_queues: int = 0

    def __sub__(self, other: Statements) -> Statements:
        return Statements(**{name: value - getattr(other, name) for name, value in asdict(self).items()})

    def count(self, statement: str, times: int = 1) -> None:
        """Add a statement that is executed so many times."""
        if QUEUE_TABLES in statement:
            self.of_queues += times
        else:
            self.executions += times


@contextlib.contextmanager
def counted_statements() -> Iterator[Statements]:
    """Count the statements that this process sends, in the block, on connections to databases that are opened in it.

    Not all of ours go through SQLAlchemy: of PostgreSQL's psycopg tells, and of those of a queue in a file SQLite.
    """
    counted = Statements()
    cursors = _counting(counted)

    def trace(statement: str) -> None:
        if QUEUE_TABLES in statement:
            counted.count(statement)

    def follow(connection: DBAPIConnection, _record: object) -> None:
        driver = getattr(connection, "driver_connection", connection)
        if isinstance(driver, AsyncConnection):
            driver.cursor_factory = cursors
        elif isinstance(driver, sqlite3.Connection):
            driver.set_trace_callback(trace)

    def hear(sender: Connection, _cursor: object, statement: str, parameters: Any, _by: object, many: bool) -> None:
        driver = sender.connection.driver_connection
        is_traced = isinstance(driver, sqlite3.Connection) and QUEUE_TABLES in statement
        if not is_traced and not isinstance(driver, AsyncConnection):
            counted.count(statement, len(parameters) if many else 1)

    event.listen(Pool, "connect", follow)
    event.listen(Engine, "before_cursor_execute", hear)
    try:
        yield counted
    finally:
        event.remove(Engine, "before_cursor_execute", hear)
        event.remove(Pool, "connect", follow)


def _counting(counted: Statements) -> type[AsyncCursor[Any]]:
    class Cursor(AsyncCursor[Any]):
        async def execute(self, query: Any, *arguments: Any, **options: Any) -> Self:
            if query:  # an empty one only asks whether the connection lives
                counted.count(str(query))
            return await super().execute(query, *arguments, **options)

        async def executemany(self, query: Any, params_seq: Any, **options: Any) -> None:
            counted.count(str(query), len(params_seq))
            await super().executemany(query, params_seq, **options)

    return Cursor


class CountedWorker:
    """A worker process of a node, like `federation workers run`, that reports what it asked of its database."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def statements(self) -> Statements:
        """Return the statements since its start."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return Statements(**json.loads(await self._process.stdout.readline()))


@contextlib.asynccontextmanager
async def counted_worker(environment: Mapping[str, str]) -> AsyncIterator[CountedWorker]:
    """Run such a worker until the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.outage.counting"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        yield CountedWorker(process)
    finally:
        process.kill()
        await process.communicate()


async def commands(redis: Redis | None) -> dict[str, int]:
    """Count how often each command was called since the server's start, except for this question itself."""
    if redis is None:
        return {}
    found = await redis.info("commandstats")
    return {
        name.removeprefix("cmdstat_"): int(stats["calls"])
        for name, stats in found.items()
        if name not in ("cmdstat_info", "cmdstat_memory|usage")
    }


def since(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the calls between two results of `commands`."""
    return {name: calls - before.get(name, 0) for name, calls in after.items() if calls != before.get(name, 0)}


async def _tell(counted: Statements) -> None:
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(asdict(counted)), flush=True)


async def _work() -> None:
    with counted_statements() as counted:
        telling = asyncio.create_task(_tell(counted))
        await run(Settings.from_values(os.environ), workers=True, node=False)
        telling.cancel()


if __name__ == "__main__":
    configure_logging("critical")
    asyncio.run(_work())
