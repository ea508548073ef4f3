"""How a command about one queue is declared, and run on it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from workers.command.problems import CommandError
from workers.command.targets import queue_of
from workers.errors import WorkersError
from workers.queue import Queue
from workers.storage.abilities import Migratable

if TYPE_CHECKING:
    from workers.command.arguments import Commands

NOTHING: Final = 1
"""The status if there was nothing to apply the command to."""

Work = Callable[[Queue, argparse.Namespace], Awaitable[int]]


def add_command(
    commands: Commands, name: str, work: Work, told: str, *, several: bool = False
) -> argparse.ArgumentParser:
    """Add a command about one queue, or several in turn, and return its parser for more arguments.

    `work` returns the status; the first that is not 0 is the last.
    """
    parser = commands.add_parser(name, help=told, description=f"{told[0].upper()}{told[1:]}.")
    if several:
        parser.add_argument("queues", metavar="QUEUE", nargs="+", help="module:queue, or a storage's URL")
    else:
        parser.add_argument("queue", metavar="QUEUE", help="module:queue, or a storage's URL")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=partial(_run, work))
    return parser


def _run(work: Work, options: argparse.Namespace) -> int:
    for target in getattr(options, "queues", None) or [options.queue]:
        status = asyncio.run(with_queue(target, lambda queue: work(queue, options)))
        if status:
            return status
    return 0


async def with_queue(target: str, work: Callable[[Queue], Awaitable[int]]) -> int:
    """Return the status of `work` with the queue that `target` names, which runs no worker here.

    Raises:
        CommandError: it does not exist, or a memory storage's jobs would be gone with this command.
    """
    queue = queue_of(target)
    if queue.storage.capabilities.processes == "one":
        raise CommandError(f"{queue.storage!r} keeps its jobs in the process that works; no other one sees them")
    try:
        return await work(queue)
    except WorkersError as error:
        raise CommandError(_advised(error, queue, target)) from error
    finally:
        await queue.stop()


def _advised(error: WorkersError, queue: Queue, target: str) -> str:
    """Return the error with what to type where the tables are missing."""
    if isinstance(queue.storage, Migratable) and "migrate()" in str(error):
        return str(error).replace("module:app", "URL" if "://" in target else target)
    return f"{type(error).__name__}: {error}"
