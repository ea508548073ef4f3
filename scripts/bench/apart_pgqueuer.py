"""A producer or worker of pgqueuer, told what to do by lines of JSON; see `bench_apart.py`.

python scripts/bench/apart_pgqueuer.py <database url> <concurrency> capped|uncapped

It runs with an interpreter that has pgqueuer and asyncpg, and needs nothing else. Capped, as many handlers run at once
as ours has slots, and a batch is half of them, as pgqueuer demands; uncapped, which is its default, a batch has as many
jobs as ours has slots, and any number of them run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.queries import Queries

PAYLOAD = "x" * 1000
BATCH = 500
DRIP_SECONDS = 0.01
NAME = "bench"


class Process:
    """What can be asked for, by name."""

    def __init__(self, url: str, concurrency: int, capped: bool) -> None:
        self._url = url.replace("postgresql+psycopg://", "postgresql://", 1)
        self._sizes = (concurrency // 2, concurrency) if capped else (concurrency, None)
        self.calls: dict[str, Callable[[int], Awaitable[object]]] = {
            "one_by_one": self.one_by_one,
            "in_bulk": self.in_bulk,
            "drip": self.drip,
            "work": self.work,
        }

    async def open(self) -> None:
        """Connect the producer, and make the tables unless the other process has."""
        self._connection = await asyncpg.connect(self._url)
        self._queries = Queries.from_asyncpg_connection(self._connection)
        await self._connection.execute("SELECT pg_advisory_lock(1)")
        if not await self._connection.fetchval("SELECT to_regclass('pgqueuer') IS NOT NULL"):
            await self._queries.install()
        await self._connection.execute("SELECT pg_advisory_unlock(1)")

    async def one_by_one(self, count: int) -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(count):
            await self._queries.enqueue(NAME, payload())
        return {"seconds": time.perf_counter() - started}

    async def in_bulk(self, count: int) -> dict[str, float]:
        started = time.perf_counter()
        for first in range(0, count, BATCH):
            size = min(BATCH, count - first)
            await self._queries.enqueue([NAME] * size, [payload() for _ in range(size)], [0] * size)
        return {"seconds": time.perf_counter() - started}

    async def drip(self, count: int) -> None:
        """Add one, wait a moment, and so on: the worker has nothing else to do."""
        for _ in range(count):
            await asyncio.sleep(DRIP_SECONDS)
            await self._queries.enqueue(NAME, payload())

    async def work(self, count: int) -> dict[str, float]:
        """Complete so many jobs."""
        waits: list[float] = []
        begun = ended = 0.0
        pool = await asyncpg.create_pool(self._url)
        queuer = PgQueuer.from_asyncpg_pool(pool)

        @queuer.entrypoint(NAME)
        async def handle(job: object) -> None:
            nonlocal begun, ended
            ended = time.monotonic()
            begun = begun or ended
            waits.append((ended - json.loads(job.payload)["at"]) * 1000)
            if len(waits) == count:
                queuer.shutdown.set()

        cpu = cpu_seconds()
        batch, cap = self._sizes
        await queuer.run(batch_size=batch, max_concurrent_tasks=cap, dequeue_timeout=timedelta(seconds=30))
        used = cpu_seconds() - cpu
        await pool.close()
        return {"seconds": ended - begun, "cpu_seconds": used, "median_wait_ms": statistics.median(waits)}


def payload() -> bytes:
    return json.dumps({"payload": PAYLOAD, "at": time.monotonic()}).encode()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def main() -> None:
    """Answer each line until the input ends."""
    process = Process(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "capped")
    await process.open()
    print(json.dumps({"ok": "ready"}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, count = json.loads(line)
        print(json.dumps({"ok": await process.calls[name](count)}), flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(main())
