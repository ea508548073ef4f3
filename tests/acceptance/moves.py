"""What an operator does to a node's database and queues between stopping it and starting it again."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from db import DeliveryJob
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from tests import warm
from tests.acceptance.worker_process import WorkerProcess
from tests.misbehaving import Exchange, Received
from tests.patience import LONG_PATIENCE_SECONDS, PATIENCE_SECONDS, eventually, until
from tests.peer import Peer


@asynccontextmanager
async def application(environment: Mapping[str, str]) -> AsyncIterator[Federation]:
    """The application's side of the node, for as long as it has no reason to stop."""
    node = Federation(Settings.from_values(environment))
    try:
        yield node
    finally:
        await node.close()


async def command(environment: Mapping[str, str], directory: Path, *arguments: str) -> Any:  # whatever its JSON holds
    """The JSON of `federation ARGUMENTS --json`, which went well."""
    process = await asyncio.create_subprocess_exec(
        *(warm.PYTHON, "-m", "federation", *arguments, "--json"),
        env=dict(environment),
        cwd=directory,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output)


def put_back(backup: Path, database: Path) -> None:
    """The backup takes the database's place, as the manual has it: the old one goes with what lies beside it."""
    away = database.parent / "away"
    away.mkdir()
    for file in database.parent.glob(f"{database.name}*"):
        file.rename(away / file.name)
    shutil.copy(backup, database)


class Turnstile:
    """Before a peer: deliveries wait for their answer until they are let through, or their sender is gone."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._answer = peer.server.default
        self._passes = asyncio.Semaphore(0)
        self._waiting = 0
        peer.server.default = self._behave

    async def let(self, count: int) -> None:
        """So many more are through, and another one waits."""
        arrived = len(self._peer.arrived) + count
        for _ in range(count):
            self._passes.release()
        await until(lambda: len(self._peer.arrived) == arrived and self._waiting)

    async def remove(self) -> None:
        """Of what waited nothing gets through, read or unread; what comes now is answered at once."""
        await self._peer.server.stop()
        self._peer.server.default = self._answer
        await self._peer.server.start()

    async def _behave(self, request: Received, exchange: Exchange) -> None:
        self._waiting += 1
        await self._passes.acquire()
        self._waiting -= 1
        await self._answer(request, exchange)


async def delivered_by(worker: WorkerProcess, environment: Mapping[str, str]) -> None:
    """A worker of this environment has run until nothing was owed, and stopped in good order."""
    worker.environment = environment
    await worker.start()
    async with application(environment) as node:
        await eventually(lambda: rows_left(node), lambda rows: rows == 0, patience=LONG_PATIENCE_SECONDS)
    assert worker.terminate() == 0


async def stopped_after(worker: WorkerProcess, peer: Peer, count: int) -> None:
    """A worker has delivered so many, and stopped in good order in the middle of the next ones."""
    turnstile = Turnstile(peer)
    await worker.start()
    await turnstile.let(count)
    assert await asyncio.to_thread(worker.terminate) == 0
    await turnstile.remove()


async def rows_left(node: Federation) -> int:
    async with node.database.read() as session:
        return (await session.execute(select(func.count()).select_from(DeliveryJob))).scalar_one()


def arrivals(peer: Peer) -> Counter[str]:
    """How often each delivery arrived."""
    return Counter(arrived.activity_id for arrived in peer.arrived)
