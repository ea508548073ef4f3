"""A producer or worker of another queue for Python on PostgreSQL, told by lines of JSON; see `bench_apart.py`.

python scripts/bench/apart_peer.py pgqueuer|pgqueuer-uncapped|oban <database url> <concurrency>

It runs with an interpreter that has the peer, and needs nothing else. pgqueuer has asyncpg and uvloop, as it
recommends. Capped, as many handlers run at once as ours has slots, and a batch is half of them, as it demands;
uncapped, which is its default, a batch has as many jobs as ours has slots, and any number of them run. Oban has its own
pool, and keeps what has ended for a day.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import resource
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta

PAYLOAD = "x" * 1000
BATCH = 500
DRIP_SECONDS = 0.01
NAME = "bench"
PACKAGES = {"pgqueuer": ("pgqueuer", "asyncpg", "uvloop"), "oban": ("oban", "psycopg")}


class Peer(ABC):
    """A queue of somebody else's."""

    def __init__(self, url: str, concurrency: int) -> None:
        self._url = url.replace("postgresql+psycopg://", "postgresql://", 1)
        self._concurrency = concurrency

    @abstractmethod
    async def open(self) -> None:
        """Connect the producer, and make the tables unless the other process has."""

    @abstractmethod
    async def add(self) -> None:
        """Add one job."""

    @abstractmethod
    async def add_many(self, count: int) -> None:
        """Add so many at once."""

    @abstractmethod
    async def run(self, handle: Callable[[float], bool]) -> None:
        """Give each job's time to `handle` until that says that it was the last."""


class PgQueuer(Peer):
    """See above."""

    is_capped = True

    async def open(self) -> None:
        import asyncpg
        from pgqueuer.queries import Queries

        self._connection = await asyncpg.connect(self._url)
        self._queries = Queries.from_asyncpg_connection(self._connection)
        await self._connection.execute("SELECT pg_advisory_lock(1)")
        if not await self._connection.fetchval("SELECT to_regclass('pgqueuer') IS NOT NULL"):
            await self._queries.install()
        await self._connection.execute("SELECT pg_advisory_unlock(1)")

    async def add(self) -> None:
        await self._queries.enqueue(NAME, json.dumps(arguments()).encode())

    async def add_many(self, count: int) -> None:
        payloads = [json.dumps(arguments()).encode() for _ in range(count)]
        await self._queries.enqueue([NAME] * count, payloads, [0] * count)

    async def run(self, handle: Callable[[float], bool]) -> None:
        import asyncpg
        import pgqueuer

        pool = await asyncpg.create_pool(self._url)
        queuer = pgqueuer.PgQueuer.from_asyncpg_pool(pool)

        @queuer.entrypoint(NAME)
        async def work(job: pgqueuer.Job) -> None:
            if handle(json.loads(job.payload)["at"]):
                queuer.shutdown.set()

        sizes = (self._concurrency // 2, self._concurrency) if self.is_capped else (self._concurrency, None)
        waits = timedelta(seconds=30)
        await queuer.run(batch_size=sizes[0], max_concurrent_tasks=sizes[1], dequeue_timeout=waits)
        await pool.close()


class UncappedPgQueuer(PgQueuer):
    """See above."""

    is_capped = False


class Oban(Peer):
    """See above."""

    _on_job: Callable[[float], None]

    async def open(self) -> None:
        import oban
        from oban.schema import install

        self._pool = await oban.Oban.create_pool(self._url)
        async with self._pool.connection() as connection:
            await connection.execute("SELECT pg_advisory_lock(1)")
            found = await connection.execute("SELECT to_regclass('oban_jobs') IS NOT NULL")
            if not (await found.fetchone())[0]:
                await install(self._pool)
            await connection.execute("SELECT pg_advisory_unlock(1)")

        def on_job(at: float) -> None:
            self._on_job(at)

        @oban.worker(queue=NAME)
        class Bench:
            async def process(self, job: oban.Job) -> None:
                on_job(job.args["at"])

        self._job = Bench
        self._producer = oban.Oban(pool=self._pool)
        await self._producer.start()

    async def add(self) -> None:
        await self._job.enqueue(arguments())

    async def add_many(self, count: int) -> None:
        await self._producer.enqueue_many(self._job.new(arguments()) for _ in range(count))

    async def run(self, handle: Callable[[float], bool]) -> None:
        import oban

        is_done = asyncio.Event()
        self._on_job = lambda at: is_done.set() if handle(at) else None
        async with oban.Oban(pool=self._pool, queues={NAME: self._concurrency}, name="worker"):
            await is_done.wait()


PEERS = {"pgqueuer": PgQueuer, "pgqueuer-uncapped": UncappedPgQueuer, "oban": Oban}


class Process:
    """What can be asked for, by name."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def one_by_one(self, count: int) -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(count):
            await self._peer.add()
        return {"seconds": time.perf_counter() - started}

    async def in_bulk(self, count: int) -> dict[str, float]:
        started = time.perf_counter()
        for first in range(0, count, BATCH):
            await self._peer.add_many(min(BATCH, count - first))
        return {"seconds": time.perf_counter() - started}

    async def drip(self, count: int) -> None:
        """Add one, wait a moment, and so on: the worker has nothing else to do."""
        for _ in range(count):
            await asyncio.sleep(DRIP_SECONDS)
            await self._peer.add()

    async def work(self, count: int) -> dict[str, float]:
        """Complete so many jobs."""
        waits: list[float] = []
        begun = ended = 0.0

        def handle(at: float) -> bool:
            nonlocal begun, ended
            ended = time.monotonic()
            begun = begun or ended
            waits.append((ended - at) * 1000)
            return len(waits) == count

        cpu = cpu_seconds()
        await self._peer.run(handle)
        used = cpu_seconds() - cpu
        return {"seconds": ended - begun, "cpu_seconds": used, "median_wait_ms": statistics.median(waits)}


def arguments() -> dict[str, object]:
    return {"payload": PAYLOAD, "at": time.monotonic()}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def main(peer: Peer) -> None:
    """Answer each line until the input ends."""
    await peer.open()
    process = Process(peer)
    print(json.dumps({"ok": "ready"}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, count = json.loads(line)
        print(json.dumps({"ok": await getattr(process, name)(count)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "versions":
        wanted = PACKAGES[sys.argv[2].removesuffix("-uncapped")]
        print(json.dumps({name: importlib.metadata.version(name) for name in wanted}))
    else:
        logging.disable(logging.CRITICAL)
        factory = None
        if sys.argv[1].startswith("pgqueuer"):
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main(PEERS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))))
