"""A producer or worker of ours, told what to do by lines of JSON; see `bench_apart.py`.

python scripts/bench/apart_process.py <storage url> <concurrency>
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.trees import measured_tree

sys.path.insert(0, measured_tree())

from bench.ours import cpu_seconds
from bench.storages import BATCH, PAYLOAD
from workers import Job, JobSpec, Queue, Worker
from workers.storage.sql import SqlStorage
from workers.storage.urls import open_storage

DRIP_SECONDS = 0.01


class Process:
    """What can be asked for, by name."""

    def __init__(self, url: str, concurrency: int) -> None:
        self.storage = open_storage(url, queue="bench")
        self._queue = Queue(self.storage)
        self._concurrency = concurrency
        self.calls: dict[str, Callable[[int], Awaitable[object]]] = {
            "one_by_one": self.one_by_one,
            "in_bulk": self.in_bulk,
            "drip": self.drip,
            "work": self.work,
        }

    async def one_by_one(self, count: int) -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(count):
            await self._queue.enqueue(payload())
        return {"seconds": time.perf_counter() - started}

    async def in_bulk(self, count: int) -> dict[str, float]:
        started = time.perf_counter()
        for first in range(0, count, BATCH):
            await self._queue.enqueue_many([JobSpec(payload=payload()) for _ in range(min(BATCH, count - first))])
        return {"seconds": time.perf_counter() - started}

    async def drip(self, count: int) -> None:
        """Add one, wait a moment, and so on: the worker has nothing else to do."""
        for _ in range(count):
            await asyncio.sleep(DRIP_SECONDS)
            await self._queue.enqueue(payload())

    async def work(self, count: int) -> dict[str, float]:
        """Complete so many jobs."""
        waits: list[float] = []
        begun = ended = 0.0

        async def handle(job: Job) -> None:
            nonlocal begun, ended
            ended = time.monotonic()
            begun = begun or ended
            assert isinstance(job.payload, dict)
            waits.append((ended - job.payload["at"]) * 1000)
            if len(waits) == count:
                worker.stop()

        worker = Worker(self.storage, {"*": handle}, concurrency=self._concurrency)
        cpu = cpu_seconds()
        await worker.run()
        return {
            "seconds": ended - begun,
            "cpu_seconds": cpu_seconds() - cpu,
            "median_wait_ms": statistics.median(waits),
        }


def payload() -> dict[str, object]:
    return {"payload": PAYLOAD, "at": time.monotonic()}


async def main() -> None:
    """Answer each line until the input ends."""
    process = Process(sys.argv[1], int(sys.argv[2]))
    if isinstance(process.storage, SqlStorage):
        await process.storage.migrate()
    async with Queue(process.storage):
        print(json.dumps({"ok": "ready"}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, count = json.loads(line)
            print(json.dumps({"ok": await process.calls[name](count)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
