"""Counts what a node asks of its database and its queues: statements of a process, and commands of a Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import Engine, event

from federation.base.logs import configure_logging
from federation.base.settings import Settings
from federation.run import run

QUEUE_TABLES = "workers_"


@dataclass(slots=True)
class Statements:
    """`executions` counts each set of parameters of a statement for many, `of_queues` those on the queues' tables."""

    statements: int = 0
    executions: int = 0
    of_queues: int = 0

    def __sub__(self, other: Statements) -> Statements:
        return Statements(**{name: value - getattr(other, name) for name, value in asdict(self).items()})


@contextlib.contextmanager
def counted_statements() -> Any:
    """Count the statements that this process sends to any database in the block."""
    counted = Statements()

    def count(_c: object, _cursor: object, statement: str, parameters: Any, _context: object, many: bool) -> None:
        times = len(parameters) if many else 1
        counted.statements += 1
        counted.executions += times
        counted.of_queues += times if QUEUE_TABLES in statement else 0

    event.listen(Engine, "before_cursor_execute", count)
    try:
        yield counted
    finally:
        event.remove(Engine, "before_cursor_execute", count)


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
