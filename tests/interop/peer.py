"""A Node process with one BullMQ queue, as an object."""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ANSWER_SECONDS = 20.0


class NodePeer:
    """Adds, reads and works jobs with npm `bullmq`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def answer(self) -> Any:
        """What Node said next."""
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_SECONDS):
            line = await self._process.stdout.readline()
        message = json.loads(line or b'{"error": "the Node process ended"}')
        assert "error" not in message, message["error"]
        return message["ok"]

    async def call(self, name: str, argument: object) -> Any:
        """The result of one of the calls in `peer.mjs`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, argument]).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.answer()

    async def add(self, *jobs: dict[str, object]) -> list[str]:
        """Jobs as `queue.addBulk` takes them are in the queue; their ids."""
        return list(await self.call("add", jobs))

    async def read(self, job_id: str) -> dict[str, Any]:
        """The job as Node sees it."""
        [found] = await self.call("read", [job_id])
        return dict(found)

    async def work(self, count: int) -> list[dict[str, Any]]:
        """A Node worker ran until `count` jobs had ended; every run it did."""
        return list(await self.call("work", count))


@asynccontextmanager
async def node_peer(url: str, queue: str) -> AsyncIterator[NodePeer]:
    """A Node process on the queue, gone when the context ends."""
    process = await asyncio.create_subprocess_exec(
        *("node", str(HERE / "peer.mjs"), url, queue),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 22,
    )
    peer = NodePeer(process)
    try:
        await peer.answer()
        yield peer
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def install_npm_packages() -> None:
    """`node_modules` holds what the lock file says; a machine without Node skips the test and says so."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("NODE INTEROPERABILITY DID NOT RUN: there is no `node` and `npm` on this machine")
    installed = HERE / "node_modules" / ".package-lock.json"
    # The file doubles as the lock between processes of one test run.
    with (HERE / "package-lock.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed.exists() and installed.stat().st_mtime >= Path(lock.name).stat().st_mtime:
            return
        result = subprocess.run(["npm", "ci"], cwd=HERE, capture_output=True, text=True, timeout=100, check=False)
        assert result.returncode == 0, f"npm ci failed:\n{result.stderr}"
