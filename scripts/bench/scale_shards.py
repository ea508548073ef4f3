"""Deliveries spread over four queues by their servers, in four places; one of the places dies, and comes back."""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from redis.crc import key_slot

from bench.server_cpu import Cpu, PostgresCpu, RedisCpu
from tests.deployments import SLOTS, cluster
from tests.interop.peer import NodeProcess
from tests.servers import PostgresProcess, ValkeyProcess, postgres_process, valkey
from workers import DROP, JobSpec, Queue
from workers.errors import StorageUnavailable
from workers.storage import open_storage
from workers.storage.sql import SqlStorage

HERE: Final = Path(__file__).parent
SHARDS: Final = 4
AT_ONCE: Final = 500
PER_SERVER: Final = 10
"""How many jobs each server gets, in an order of their own."""
PATIENCE_SECONDS: Final = 300.0
TEXT: Final = "x" * 600
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one shard lives: the storage's URL, the queue's name, and how to kill its server and bring it back."""

    url: str
    queue: str
    cpu: Callable[[], Cpu]
    kill: Callable[[], None]
    revive: Callable[[], None]

    def storage(self) -> Queue:
        """Return the queue, as a producer has it."""
        return Queue(open_storage(self.url, queue=self.queue))


async def spread(kind: str, jobs: int, servers: int, tell: Tell) -> dict[str, object]:
    """Send the jobs through four shards, half of them while one shard is away for a time.

    Raises:
        RuntimeError: a job was lost, came in another order than its server's, or waited for a shard that is not its.
    """
    async with AsyncExitStack() as stack:
        places = await stack.enter_async_context(PLACES[kind]())
        queues = []
        for place in places:
            queue = place.storage()
            if isinstance(queue.storage, SqlStorage):
                await queue.storage.migrate()
            queues.append(await stack.enter_async_context(queue))
        workers = [await stack.enter_async_context(_worker(place)) for place in places]
        figures = await _Run(places, queues, workers, jobs).all()
    figures = {"kind": kind, **figures, "evenness": evenness(servers)}
    tell(f"  {figures}")
    return figures


class _Run:
    def __init__(
        self, places: Sequence[Place], queues: Sequence[Queue], workers: Sequence[NodeProcess], jobs: int
    ) -> None:
        self._places = places
        self._queues = queues
        self._workers = workers
        half = max(jobs // 2 // PER_SERVER, SHARDS)
        self._servers = [f"https://social-{number}.example" for number in range(half)]
        self._wanted = Counter(shard_of(server) for server in self._servers)

    async def all(self) -> dict[str, object]:
        """Measure all shards together, then kill one and see that the others go on, then bring it back."""
        cpus = [place.cpu() for place in self._places]
        first = [await worker.call("told") for worker in self._workers]
        before = [each.seconds() for each in cpus]
        began = time.perf_counter()
        await asyncio.gather(*(self._enqueue(shard, 0) for shard in range(SHARDS)))
        await self._done(range(SHARDS), 1)
        seconds = time.perf_counter() - began
        spent = [each.seconds() - earlier for each, earlier in zip(cpus, before, strict=True)]
        told = [await worker.call("told") for worker in self._workers]

        await self._enqueue(0, 1)
        self._places[0].kill()
        began = time.perf_counter()
        await asyncio.gather(*(self._enqueue(shard, 1) for shard in range(1, SHARDS)))
        await self._done(range(1, SHARDS), 2)
        others = time.perf_counter() - began
        refused = await self._refuses(0)
        self._places[0].revive()
        await self._done([0], 2)
        ended = [await worker.call("told") for worker in self._workers]
        if any(each["disordered"] for each in ended) or not refused:
            raise RuntimeError(f"{ended}; the dead shard refused an enqueue: {refused}")
        return {
            "jobs": 2 * PER_SERVER * len(self._servers),
            "jobs_per_s": round(PER_SERVER * len(self._servers) / seconds),
            "shards": [
                self._shard(shard, spent[shard], told[shard]["cpu"] - first[shard]["cpu"]) for shard in range(SHARDS)
            ],
            "others_s_while_one_was_away": round(others, 2),
            "ran_again": sum(each["again"] for each in ended),
        }

    def _shard(self, shard: int, server: float, worker: float) -> dict[str, float]:
        jobs = PER_SERVER * self._wanted[shard]
        spent = {"server_us": server, "worker_us": worker}
        return {"jobs": jobs} | {name: round(seconds / jobs * 1e6, 1) for name, seconds in spent.items()}

    async def _enqueue(self, shard: int, turn: int) -> None:
        """Add the jobs of this shard's servers, each server's in order."""
        mine = [server for server in self._servers if shard_of(server) == shard]
        specs = [
            JobSpec(
                payload={"server": server, "number": turn * PER_SERVER + number, "text": TEXT},
                ordering_key=server,
                keep_completed=DROP,
            )
            for number in range(PER_SERVER)
            for server in mine
        ]
        for start in range(0, len(specs), AT_ONCE):
            await self._queues[shard].enqueue_many(specs[start : start + AT_ONCE])

    async def _done(self, shards: Sequence[int], turns: int) -> None:
        """Wait until the jobs of these shards are done."""
        wanted = {shard: turns * PER_SERVER * self._wanted[shard] for shard in shards}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left := {shard: done for shard, done in (await self._counts(shards)).items() if done < wanted[shard]}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"of {wanted} only {left} are done")
            await asyncio.sleep(0.05)

    async def _counts(self, shards: Sequence[int]) -> dict[int, int]:
        return {shard: int((await self._workers[shard].call("told"))["done"]) for shard in shards}

    async def _refuses(self, shard: int) -> bool:
        """Tell whether a producer hears that the shard is away."""
        with suppress(StorageUnavailable):
            await self._queues[shard].enqueue({"server": "nobody", "number": 0})
            return False
        return True


def shard_of(server: str) -> int:
    """Return the shard of a server: the same in every process, whatever its hash seed."""
    return zlib.crc32(server.encode()) % SHARDS


def evenness(servers: int) -> dict[str, float]:
    """Return how much more the fullest shard has than a quarter: by servers, and if server k gets 1/k of the jobs."""
    found: dict[str, float] = {}
    for name, weight in (("servers", lambda _: 1.0), ("zipf", lambda number: 1 / (number + 1))):
        shares = [0.0] * SHARDS
        for number in range(servers):
            shares[shard_of(f"https://{sha256(str(number).encode()).hexdigest()[:12]}.example")] += weight(number)
        found[name] = round(max(shares) * SHARDS / sum(shares) - 1, 4)
    return found


@asynccontextmanager
async def _worker(place: Place) -> AsyncIterator[NodeProcess]:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, str(HERE / "scale_shard_process.py"), place.url, place.queue]
    process = NodeProcess(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
    try:
        await process.answer()
        yield process
    finally:
        await process.kill()


@asynccontextmanager
async def _on_valkey() -> AsyncIterator[list[Place]]:
    async with AsyncExitStack() as stack:
        servers = [stack.enter_context(valkey()) for _ in range(SHARDS)]
        yield [_redis_place(server, server.url, "deliveries") for server in servers]


@asynccontextmanager
async def _on_a_cluster() -> AsyncIterator[list[Place]]:
    """Choose a name for each queue whose slot is on a server of its own."""
    with cluster(masters=SHARDS, replicas=0) as masters:
        await masters.ready()
        yield [_redis_place(node, masters.url, name_on(shard)) for shard, node in enumerate(masters.nodes)]


def name_on(shard: int) -> str:
    """Return a name whose queue lies on the cluster's server of this number: its slot is in that part of the slots."""
    names = (f"deliveries-{shard}-{number}" for number in range(10_000))
    return next(name for name in names if key_slot(f"{{workers:{name}}}".encode()) * SHARDS // SLOTS == shard)


def _redis_place(server: ValkeyProcess, url: str, queue: str) -> Place:
    return Place(url=url, queue=queue, cpu=lambda: RedisCpu(server.url), kill=server.kill, revive=server.start)


@asynccontextmanager
async def _on_postgres() -> AsyncIterator[list[Place]]:
    async with AsyncExitStack() as stack:
        servers = [stack.enter_context(postgres_process()) for _ in range(SHARDS)]
        yield [_postgres_place(server) for server in servers]


def _postgres_place(server: PostgresProcess) -> Place:
    url = server.url.replace("postgresql+psycopg", "postgresql", 1)
    return Place(url=url, queue="deliveries", cpu=lambda: PostgresCpu(url), kill=server.crash, revive=server.start)


PLACES: Final = {"valkey": _on_valkey, "cluster": _on_a_cluster, "postgres": _on_postgres}
