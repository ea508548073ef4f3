"""Measures one other queue. `peers.py` runs this with an interpreter that has it; it needs nothing else.

    python peer_process.py installed
    python peer_process.py run PEER URL CONCURRENCY JOBS

All are measured alike: jobs of 1 KiB enqueued up front in the fastest documented way, a handler that does nothing, time
from the start of the worker to the last handler, nothing kept of completed jobs, no logging, the standard event loop.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

Act: TypeAlias = Callable[[], Awaitable[object]]

PAYLOAD = "x" * 1000
BATCH = 500
PACKAGE_OF = {
    "arq": "arq",
    "saq": "saq",
    "stock-bullmq": "bullmq",
    "procrastinate": "procrastinate",
    "pgqueuer": "pgqueuer",
    "pgqueuer-uncapped": "pgqueuer",
}


class Watch:
    """Counts jobs done, and notes how long enqueueing and processing took."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.done = 0
        self.all_done = asyncio.Event()
        self._began = time.perf_counter()
        self._enqueued = self._started = self._ended = 0.0
        self._cpu = self._cpu_at_end = 0.0

    def batches(self) -> Iterator[int]:
        """Yield the sizes of the batches to enqueue."""
        self._began = time.perf_counter()
        for start in range(0, self.jobs, BATCH):
            yield min(BATCH, self.jobs - start)
        self._enqueued = time.perf_counter()

    def start(self) -> None:
        """Note that the worker is about to start."""
        self._cpu, self._started = time.process_time(), time.perf_counter()

    def tick(self) -> None:
        """Count one more handler."""
        self.done += 1
        if self.done == self.jobs:
            self._ended, self._cpu_at_end = time.perf_counter(), time.process_time()
            self.all_done.set()

    def measured(self) -> dict[str, float]:
        assert self.done == self.jobs, f"{self.done} of {self.jobs} jobs were done"
        return {
            "enqueued_per_s": self.jobs / (self._enqueued - self._began),
            "processed_per_s": self.jobs / (self._ended - self._started),
            "cpu_per_job_us": (self._cpu_at_end - self._cpu) * 1e6 / self.jobs,
        }


async def arq(url: str, concurrency: int, watch: Watch) -> None:
    """Measure arq with `max_jobs` as concurrency, and without results.

    The poll delay is 10 ms, because with its 500 it would mostly sleep.
    """
    from arq.connections import RedisSettings, create_pool
    from arq.worker import Worker, func

    async def handle(_: dict[object, object], payload: str) -> None:
        watch.tick()

    settings = RedisSettings.from_dsn(url)
    pool = await create_pool(settings)
    for size in watch.batches():
        await asyncio.gather(*(pool.enqueue_job("handle", PAYLOAD) for _ in range(size)))
    await pool.aclose()
    worker = Worker(
        [func(handle, name="handle", keep_result=0)],
        redis_settings=settings,
        max_jobs=concurrency,
        poll_delay=0.01,
        log_results=False,
        handle_signals=False,
    )
    await _until_done(watch, worker.async_run, worker.close)


async def saq(url: str, concurrency: int, watch: Watch) -> None:
    """Measure saq with `concurrency`, and blocking dequeue, which is its default; a ttl of -1 keeps no result."""
    from saq import Queue, Worker

    async def handle(_: object, *, payload: str) -> None:
        watch.tick()

    queue = Queue.from_url(url)
    await queue.connect()
    for size in watch.batches():
        await asyncio.gather(*(queue.enqueue("handle", payload=PAYLOAD, ttl=-1) for _ in range(size)))
    worker = Worker(queue, [("handle", handle)], concurrency=concurrency)
    worker.SIGNALS = []
    await _until_done(watch, worker.start, worker.stop)
    await queue.disconnect()


async def stock_bullmq(url: str, concurrency: int, watch: Watch) -> None:
    """Measure BullMQ with `concurrency`, `addBulk`, and `removeOnComplete`."""
    from bullmq import Queue, Worker

    async def handle(job: object, token: str) -> None:
        watch.tick()

    queue = Queue("bench", {"connection": url})
    for size in watch.batches():
        await queue.addBulk([{"name": "job", "data": {"payload": PAYLOAD}, "opts": {}} for _ in range(size)])
    options = {"connection": url, "concurrency": concurrency, "autorun": False, "removeOnComplete": {"count": 0}}
    worker = Worker("bench", handle, options)
    await _until_done(watch, worker.run, worker.close)
    await queue.close()


async def procrastinate(url: str, concurrency: int, watch: Watch) -> None:
    """Measure procrastinate with `concurrency`, its own pool's size, and done jobs deleted.

    It uses `wait=False` without LISTEN, as nothing more comes.
    """
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=_plain(url)))

    @app.task(name="handle")
    async def handle(payload: str) -> None:
        watch.tick()

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for size in watch.batches():
            await handle.batch_defer_async(*({"payload": PAYLOAD} for _ in range(size)))
        watch.start()
        await app.run_worker_async(
            concurrency=concurrency,
            wait=False,
            listen_notify=False,
            delete_jobs="successful",
            install_signal_handlers=False,
        )


async def pgqueuer(url: str, concurrency: int, watch: Watch) -> None:
    """Measure pgqueuer with `max_concurrent_tasks` as concurrency, and asyncpg, its faster driver.

    The batch is half the concurrency, as it demands.
    """
    await _pgqueuer(url, watch, batch_size=concurrency // 2, max_concurrent_tasks=concurrency)


async def pgqueuer_uncapped(url: str, concurrency: int, watch: Watch) -> None:
    """Measure pgqueuer with its default: batches as large as the concurrency, any number of which run at once."""
    await _pgqueuer(url, watch, batch_size=concurrency, max_concurrent_tasks=None)


async def _pgqueuer(url: str, watch: Watch, *, batch_size: int, max_concurrent_tasks: int | None) -> None:
    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.queries import Queries
    from pgqueuer.types import QueueExecutionMode

    pool = await asyncpg.create_pool(_plain(url))
    queries = Queries.from_asyncpg_pool(pool)
    await queries.install()
    payload = PAYLOAD.encode()
    for size in watch.batches():
        await queries.enqueue(["handle"] * size, [payload] * size, [0] * size)
    queuer = PgQueuer.from_asyncpg_pool(pool)

    @queuer.entrypoint("handle")
    async def handle(job: object) -> None:
        watch.tick()

    watch.start()
    await queuer.qm.run(batch_size=batch_size, max_concurrent_tasks=max_concurrent_tasks, mode=QueueExecutionMode.drain)
    await pool.close()


PEERS = {
    "arq": arq,
    "saq": saq,
    "stock-bullmq": stock_bullmq,
    "procrastinate": procrastinate,
    "pgqueuer": pgqueuer,
    "pgqueuer-uncapped": pgqueuer_uncapped,
}


async def _until_done(
    watch: Watch, run: Callable[[], Awaitable[object]], stop: Callable[[], Awaitable[object]]
) -> None:
    watch.start()
    running = asyncio.ensure_future(run())
    finished = asyncio.ensure_future(watch.all_done.wait())
    await asyncio.wait([running, finished], return_when=asyncio.FIRST_COMPLETED)
    if not finished.done():
        raise RuntimeError("the worker stopped early") from running.exception()
    await asyncio.sleep(0.2)  # the last jobs are being put away
    await stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _plain(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://", 1)


def _installed() -> dict[str, str]:
    found = {}
    for peer, package in PACKAGE_OF.items():
        try:
            found[peer] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


async def _run(peer: str, url: str, concurrency: str, jobs: str) -> dict[str, float]:
    watch = Watch(int(jobs))
    await PEERS[peer](url, int(concurrency), watch)
    return watch.measured()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(_installed() if sys.argv[1] == "installed" else asyncio.run(_run(*sys.argv[2:]))), flush=True)
