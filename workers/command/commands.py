"""How a command about one queue is declared, and run on it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from workers.command.problems import CommandError
from workers.command.targets import queue_of
from workers.errors import WorkersError
from workers.queue import Queue

if TYPE_CHECKING:
    from workers.command.arguments import Commands

NOTHING: Final = 1
"""The status if there was nothing to apply the command to."""

Work = Callable[[Queue, argparse.Namespace], Awaitable[int]]


@runtime_checkable
class Migratable(Protocol):
    """A storage in a database that other tables share."""

    async def migrate(self) -> None:
        """Make its tables, or bring them to this version."""


def add_command(commands: Commands, name: str, work: Work, told: str) -> argparse.ArgumentParser:
    """Add a command about one queue, and return its parser for more arguments; `work` returns the status."""
    parser = commands.add_parser(name, help=told, description=f"{told[0].upper()}{told[1:]}.")
    parser.add_argument("queue", metavar="QUEUE", help="module:queue, or a storage's URL")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=partial(_run, work))
    return parser


def _run(work: Work, options: argparse.Namespace) -> int:
    return asyncio.run(with_queue(options.queue, lambda queue: work(queue, options)))


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
        shown = "URL" if "://" in target else target
        return f"{error}; or once: python -m workers migrate {shown}"
    return f"{type(error).__name__}: {error}"
