"""A Python worker on a Bull queue, in a process of its own that may be killed; see `Order`.

`python -m tests.interop.bull_child '{"url": …}'` works until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from tests import warm
from tests.chaos.ledger import Ledger
from tests.interop.bull_jobs import Obedient
from workers import Worker, WorkerOptions
from workers.storage.bull import BullStorage
from workers.storage.bull.codec import Dialect

ROOT = Path(__file__).resolve().parents[2]
OFTEN = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a child is to do; travels as JSON. `ledger` names the file that tells its runs."""

    url: str
    queue: str
    dialect: Dialect
    ledger: str
    concurrency: int = 5
    lease_seconds: float = 1.0


async def spawn(order: Order) -> asyncio.subprocess.Process:
    """A child at work on the order; it ends with this process."""
    command = [warm.PYTHON, "-m", "tests.interop.bull_child", json.dumps(asdict(order))]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=asyncio.subprocess.PIPE)


@asynccontextmanager
async def bull_child(order: Order) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child at work on the order, gone when the context ends."""
    process = await spawn(order)
    try:
        yield process
    finally:
        await kill(process)


async def kill(process: asyncio.subprocess.Process) -> None:
    """`kill -9`; it is gone."""
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def work(order: Order) -> None:
    """The child's side: runs until the process ends."""
    worker = Worker(
        BullStorage(order.url, order.queue, dialect=order.dialect),
        {"*": Obedient(Ledger(order.ledger))},
        concurrency=order.concurrency,
        lease=timedelta(seconds=order.lease_seconds),
        options=WorkerOptions(max_stalls=OFTEN),
    )
    await worker.run()


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    threading.Thread(target=end_with_input, daemon=True).start()
    asyncio.run(work(Order(**json.loads(sys.argv[1]))))
