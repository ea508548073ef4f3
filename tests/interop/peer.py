"""A Node process with one queue of npm `bullmq` or `bull`, as an object."""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

from tests.patience import PATIENCE_SECONDS

HERE = Path(__file__).parent
BULLMQ = {"5": "bullmq", "6": "bullmq-6"}
"""The npm package of each of BullMQ's versions that is tested."""

Peer = TypeVar("Peer", bound="NodeProcess")


class NodeProcess:
    """Obeys lines of JSON on its standard input, one answer each."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def answer(self) -> Any:
        """What Node said next."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = await self._process.stdout.readline()
        message = json.loads(line or b'{"error": "the Node process ended"}')
        assert "error" not in message, message["error"]
        return message["ok"]

    async def call(self, name: str, argument: object = None) -> Any:
        """The result of one of the calls in the process's script."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, argument]).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.answer()

    def stop(self) -> None:
        """It does nothing until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def dead(self) -> None:
        """It ended by itself, with an error."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await self._process.wait() > 0

    async def kill(self) -> None:
        """`kill -9`; it is gone."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()


class NodePeer(NodeProcess):
    """Adds, reads and works jobs with npm `bullmq`."""

    async def add(self, *jobs: dict[str, object]) -> list[str]:
        """Jobs as `queue.addBulk` takes them are in the queue; their ids."""
        return list(await self.call("add", jobs))

    async def read(self, job_id: str) -> dict[str, Any]:
        """The job as Node sees it."""
        [found] = await self.call("read", [job_id])
        return dict(found)

    async def manage(self, method: str, *values: object) -> Any:
        """The answer of one of the queue's methods."""
        return await self.call("manage", [method, *values])

    async def hold(self, count: int, **options: object) -> None:
        """A Node worker with these options has `count` jobs, and never ends them."""
        await self.call("hold", {"count": count, **options})

    async def work(self, count: int, **options: object) -> list[dict[str, Any]]:
        """A Node worker with these options ran until `count` jobs had ended; every run it did."""
        return list(await self.call("work", {"count": count, **options}))

    async def trace_add(self, *jobs: dict[str, object]) -> list[dict[str, Any]]:
        """A queue with telemetry added these jobs, one by one; its spans."""
        return list(await self.call("traceAdd", jobs))

    async def trace_work(self, count: int) -> list[dict[str, Any]]:
        """A worker with telemetry ran until `count` jobs had ended; its spans."""
        return list(await self.call("traceWork", {"count": count}))


class FlowPeer(NodeProcess):
    """Adds flows with npm `bullmq`, and works and reads their jobs."""

    async def add(self, tree: dict[str, object]) -> None:
        """The tree, as `FlowProducer.add` takes it, is in its queues."""
        await self.call("add", tree)

    async def read(self, queue: str, job_id: str) -> dict[str, Any]:
        """The job as Node sees it."""
        return dict(await self.call("read", {"queue": queue, "id": job_id}))

    async def work(self, **counts: int) -> None:
        """Node workers ran on these queues until so many of their jobs had ended."""
        await self.call("work", [{"queue": queue, "count": count} for queue, count in counts.items()])

    async def step(self, queue: str) -> None:
        """A Node worker has run one job of the queue once."""
        await self.call("step", queue)


class BullPeer(NodeProcess):
    """Adds, reads, works and manages jobs with npm `bull` 1.x."""

    async def add(self, data: object, **opts: object) -> str:
        """The job is in the queue; its id."""
        [job_id] = await self.call("add", [{"data": data, "opts": opts}])
        return str(job_id)

    async def read(self, job_id: str) -> dict[str, Any]:
        """The job as Node sees it."""
        return dict(await self.call("read", job_id))

    async def work(self, *, concurrency: int = 5, lock_ms: int = 1_000, sweep_ms: int = 500, stalls: int = 0) -> None:
        """Node has begun to work; Bull 1.0 sweeps once per lock. `stalls`: how often a job may, where Bull counts."""
        settings = {"concurrency": concurrency, "lock": lock_ms, "sweep": sweep_ms, "stalls": stalls}
        await self.call("process", settings)

    async def work_once(self) -> None:
        """Node has begun to wait for one job, and will run that and no other."""
        await self.call("process", {"concurrency": 1, "lock": 5_000, "sweep": 5_000, "once": True})

    async def runs(self, job_id: str | None = None) -> list[dict[str, Any]]:
        """Every run so far, or every one of this job."""
        return [run for run in await self.call("runs") if job_id in (None, run["id"])]


@asynccontextmanager
async def node_peer(package: str, url: str, queue: str, prefix: str = "bull") -> AsyncIterator[NodePeer]:
    """A Node process with this version of BullMQ on the queue, gone when the context ends."""
    async with _running(NodePeer, "peer.mjs", package, url, queue, prefix) as peer:
        yield peer


@asynccontextmanager
async def bullmq_crew(package: str, url: str, queue: str) -> AsyncIterator[NodeProcess]:
    """A Node process that adds and works jobs of the queue with this package, gone when the context ends."""
    async with _running(NodeProcess, "bullmq_crew.mjs", package, url, queue) as process:
        yield process


@asynccontextmanager
async def scheduler_peer(package: str, url: str, queue: str) -> AsyncIterator[NodeProcess]:
    """A Node process with this version of BullMQ on the queue, for job schedulers; gone when the context ends."""
    async with _running(NodeProcess, "scheduler_peer.mjs", package, url, queue) as peer:
        yield peer


@asynccontextmanager
async def flow_peer(package: str, url: str) -> AsyncIterator[FlowPeer]:
    """A Node process with this version of BullMQ for flows in any queue, gone when the context ends."""
    async with _running(FlowPeer, "flow_peer.mjs", package, url) as peer:
        yield peer


@asynccontextmanager
async def bull_peer(version: str, url: str, queue: str) -> AsyncIterator[BullPeer]:
    """A Node process with this version of Bull on the queue, gone when the context ends."""
    async with _running(BullPeer, "bull_peer.mjs", version, str(urlsplit(url).port), queue) as peer:
        yield peer


@asynccontextmanager
async def later_bull_peer(version: str, url: str, queue: str) -> AsyncIterator[NodeProcess]:
    """A Node process with Bull 3 or 4 on the queue, gone when the context ends."""
    async with _running(NodeProcess, "later_bull_peer.mjs", f"bull-{version}", url, queue) as peer:
        yield peer


@asynccontextmanager
async def _running(kind: type[Peer], script: str, *arguments: str) -> AsyncIterator[Peer]:
    peer = kind(
        await asyncio.create_subprocess_exec(
            *("node", str(HERE / script), *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 22,
        )
    )
    try:
        await peer.answer()
        yield peer
    finally:
        await peer.kill()


def install_npm_packages(folder: Path = HERE) -> None:
    """`node_modules` holds what the lock file says; a machine without Node skips the test and says so."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("NODE INTEROPERABILITY DID NOT RUN: there is no `node` and `npm` on this machine")
    installed = folder / "node_modules" / ".package-lock.json"
    # The file doubles as the lock between processes of one test run.
    with (folder / "package-lock.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed.exists() and installed.stat().st_mtime >= Path(lock.name).stat().st_mtime:
            return
        result = subprocess.run(
            ["npm", "ci"], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert result.returncode == 0, f"npm ci failed:\n{result.stderr}"
