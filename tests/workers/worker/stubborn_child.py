"""A worker whose handlers do not end: `python -m tests.workers.worker.stubborn_child URL GRACE_SECONDS`.

SIGTERM asks it to stop. Prints `ready` when all three jobs run, `asked` at every SIGTERM, and `stopped` when it has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from datetime import timedelta

import workers.worker.worker
from workers import WorkerOptions
from workers.storage.sql import SqlStorage
from workers.worker import Worker
from workers.worker.events import WorkerEvent, WorkerEventKind
from workers.worker.handlers import Job


async def obeys(job: Job) -> None:
    await asyncio.Event().wait()


async def swallows(job: Job) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def never_ends(job: Job) -> None:
    threading.Event().wait()


async def main(url: str, grace: str) -> None:
    active = 0

    def count(event: WorkerEvent) -> None:
        nonlocal active
        active += event.kind is WorkerEventKind.ACTIVE
        if event.kind is WorkerEventKind.ACTIVE and active == 3:
            print("ready", flush=True)

    worker = Worker(
        SqlStorage(url),
        {"obeys": obeys, "swallows": swallows, "never ends": never_ends},
        observers=[count],
        options=WorkerOptions(grace=timedelta(seconds=float(grace))),
    )

    def stop() -> None:
        print("asked", flush=True)
        worker.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await worker.run()
    print("stopped", flush=True)
    # As an application should: `asyncio.run` would wait for the handler that swallows its cancellation.
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
    workers.worker.worker.FORCED_STOP_SECONDS = 2.0  # type: ignore[misc]  # the test need not wait for 5 s
    asyncio.run(main(*sys.argv[1:]))
