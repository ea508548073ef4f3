"""A process that serves its share of a queue: `python -m tests.acceptance.chain_consumer URL QUEUE [hold]`.

Answers `double`, and runs the link `second` of chains; with `hold` that link prints `holding` and never ends. Prints
`ready` when it works.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from workers import Job, Worker, continue_with
from workers.chains import Continuation
from workers.storage import open_storage
from workers.worker.events import WorkerEvent, WorkerEventKind

LEASE = timedelta(seconds=2)
"""Short, as it is waited for when a process is killed; a process that only has to wait its turn keeps it."""


async def double(job: Job) -> object:
    assert isinstance(job.payload, int)
    return job.payload * 2


async def second(job: Job) -> Continuation:
    assert isinstance(job.payload, list)
    return continue_with("third", [*job.payload, f"second, attempt {job.attempt}"])


async def hold(job: Job) -> None:
    print("holding", flush=True)
    await asyncio.Event().wait()


def say_ready(event: WorkerEvent) -> None:
    if event.kind is WorkerEventKind.READY:
        print("ready", flush=True)


async def main(url: str, queue: str, how: str = "") -> None:
    handlers = {"double": double, "second": hold if how == "hold" else second}
    await Worker(open_storage(url, queue=queue), handlers, lease=LEASE, observers=[say_ready]).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
