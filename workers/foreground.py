"""A process that works and does nothing else: its log on stderr, and its end by a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Final

from workers.worker import Worker
from workers.worker.events import WorkerEvent, WorkerEventKind

logger = logging.getLogger("workers")

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_SAID: Final = ("stopping; send the signal again to skip the grace", "stopping without grace")
_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def start_logging(level: str = "info", *, process: int | None = None) -> None:
    """Log to stderr from `level` up, unless the program logs already; `process` is its number among several."""
    form = _FORMAT if process is None else _FORMAT.replace(" ", f" [{process}] ", 1)
    logging.basicConfig(level=level.upper(), format=form)


def log_ready(event: WorkerEvent) -> None:
    """Log that a worker is ready; an observer."""
    if event.kind is WorkerEventKind.READY:
        logger.info("worker %s is ready for the queue %r", event.worker_id, event.queue)


class RunsAtImport(RuntimeError):
    """A module that is imported by a command, and would work by itself, for ever, instead."""


_importing: ContextVar[bool] = ContextVar("workers_importing", default=False)


@contextmanager
def importing() -> Iterator[None]:
    """Import a module for what it declares: nothing in it may begin to work."""
    token = _importing.set(True)
    try:
        yield
    finally:
        _importing.reset(token)


def refuse_at_import() -> None:
    """Raise `RunsAtImport` if the running code is that of a module which a command imports."""
    if _importing.get():
        raise RunsAtImport('it calls run() when it is imported; put that under `if __name__ == "__main__":`')


async def run_until_stopped(workers: Sequence[Worker]) -> None:
    """Run the workers until a signal stops them, which lets jobs finish for their grace; a second one does not.

    Raises:
        Exception: what ended one of them; the others were stopped.
    """
    loop = asyncio.get_running_loop()
    said = iter(_SAID)

    def stop() -> None:
        for words in islice(said, 1):
            logger.info(words)
        for worker in workers:
            worker.stop()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    running = [asyncio.create_task(worker.run(), name=f"worker-{worker.worker_id}") for worker in workers]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in running if task.done() and task.exception() is not None]
        if failed:
            stop()
        errors = [error for error in await asyncio.gather(*running, return_exceptions=True) if error is not None]
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
    if errors:
        raise errors[0]
