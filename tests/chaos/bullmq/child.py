"""A Python worker on a BullMQ queue, in a process of its own that may be killed; see `Order`.

`python -m tests.chaos.bullmq.child '{"url": …}'` works until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

from tests import warm
from tests.chaos.ledger import Ledger
from tests.interop.bull_child import ROOT, end_with_input, kill
from tests.interop.bull_jobs import Obedient
from tests.workers.running import AT_ONCE
from workers import Worker, WorkerOptions
from workers.storage.bullmq import BullMQStorage

CONCURRENCY: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a child is to do; travels as JSON. `ledger` names the file that tells its runs."""

    url: str
    queue: str
    ledger: str
    lease_seconds: float
    stalls: int


@asynccontextmanager
async def bullmq_child(order: Order) -> AsyncIterator[None]:
    """A child is at work on the order, and gone when the context ends."""
    command = [warm.PYTHON, "-m", "tests.chaos.bullmq.child", json.dumps(asdict(order))]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=asyncio.subprocess.PIPE)
    try:
        yield
    finally:
        await kill(process)


async def work(order: Order) -> None:
    """The child's side: runs until the process ends."""
    worker = Worker(
        BullMQStorage(order.url, order.queue, max_foreign_stalls=order.stalls),
        {"*": Obedient(Ledger(order.ledger))},
        concurrency=CONCURRENCY,
        lease=timedelta(seconds=order.lease_seconds),
        options=WorkerOptions(max_stalls=order.stalls, retry=AT_ONCE),
    )
    await worker.run()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    threading.Thread(target=end_with_input, daemon=True).start()
    asyncio.run(work(Order(**json.loads(sys.argv[1]))))
