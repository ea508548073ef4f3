"""The measurements of our own storages."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Final

from redis.asyncio import Redis

from bench.storages import PAYLOAD, fill, open_storage, server
from workers import Job, Queue, Worker
from workers.storage.base import Storage
from workers.storage.redis import RedisStorage

LATENCY_SAMPLES: Final = 200
WAITERS: Final = (1, 10, 100)
WAITS_EACH: Final = 50
WAITS_AT_LEAST: Final = 1_000
MEMORY_JOBS: Final = 20_000


async def throughput(kind: str, concurrency: int, backlog: int, jobs: int) -> dict[str, float]:
    """Measure jobs enqueued per second in batches, processed per second with `backlog` behind, and idle latency."""
    async with open_storage(kind) as storage:
        started = time.perf_counter()
        await fill(storage, jobs)
        enqueued = jobs / (time.perf_counter() - started)
        await fill(storage, backlog)
        processed, cpu = await _processing_rate(storage, concurrency, jobs)
    async with open_storage(kind) as storage:
        latencies = await _idle_latencies(storage)
    return {
        "enqueued_per_s": enqueued,
        "processed_per_s": processed,
        "cpu_per_job_us": cpu,
        "idle_p50_ms": statistics.median(latencies),
        "idle_p99_ms": _p99(latencies),
    }


async def _processing_rate(storage: Storage, concurrency: int, count: int) -> tuple[float, float]:
    """Return jobs per second, and CPU microseconds of this process per job."""

    async def handle(_: Job) -> None:
        pass

    started, cpu = time.perf_counter(), cpu_seconds()
    await process(storage, concurrency, count, handle)
    return count / (time.perf_counter() - started), (cpu_seconds() - cpu) * 1e6 / count


async def process(storage: Storage, concurrency: int, count: int, answer: Callable[[Job], Awaitable[object]]) -> None:
    """Run a worker until `answer` was run for `count` jobs, and they are settled."""
    done = 0

    async def handle(job: Job) -> object:
        nonlocal done
        done += 1
        if done == count:
            worker.stop()
        return await answer(job)

    worker = Worker(storage, {"*": handle}, concurrency=concurrency)
    await worker.run()


async def _idle_latencies(storage: Storage) -> list[float]:
    """Measure the milliseconds from an enqueue to the start of its handler, with nothing else to do."""
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
            await queue.enqueue(PAYLOAD)
            latencies.append((await started_at.get() - before) * 1000)
    return latencies


async def waiting(kind: str) -> dict[str, float]:
    """Measure calls of `enqueue_and_wait` answered per second, by 1, 10 and 100 waiters, and how long ten wait each."""

    async def answer(job: Job) -> int:
        return 1

    measured = {}
    async with open_storage(kind) as storage:
        queue = Queue(storage, concurrency=max(WAITERS))
        queue.execute(answer)
        async with queue:
            for waiters in WAITERS:
                waits: list[float] = []
                count = max(WAITS_AT_LEAST, WAITS_EACH * waiters) // waiters
                started = time.perf_counter()
                await asyncio.gather(*(_wait(queue, count, waits) for _ in range(waiters)))
                measured[f"by_{waiters}_per_s"] = len(waits) / (time.perf_counter() - started)
                if waiters == 10:
                    measured |= {"by_10_p50_ms": statistics.median(waits), "by_10_p99_ms": _p99(waits)}
    return measured


async def _wait(queue: Queue, count: int, waits: list[float]) -> None:
    for _ in range(count):
        before = time.perf_counter()
        await queue.enqueue_and_wait(PAYLOAD)
        waits.append((time.perf_counter() - before) * 1000)


async def memory() -> dict[str, float]:
    """Measure what a waiting job takes in Valkey, by its `used_memory` before and after 20 000 of them."""
    with server("redis") as url:
        storage, client = RedisStorage(url, "bench"), Redis.from_url(url)
        await storage.connect()
        before = (await client.info("memory"))["used_memory"]
        await fill(storage, MEMORY_JOBS)
        after = (await client.info("memory"))["used_memory"]
        await storage.disconnect()
        await client.aclose()
    return {"per_job_kib": (after - before) / MEMORY_JOBS / 1024}


def cpu_seconds() -> float:
    """Return the CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _p99(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=100)[98]
