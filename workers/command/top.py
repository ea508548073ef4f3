"""`top`: what a queue does, live."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from workers.command.arguments import checked, positive
from workers.command.commands import with_queue
from workers.command.durations import parse_duration
from workers.command.limits import limits_table, look_at_limits
from workers.command.tables import age, heard, table
from workers.errors import StorageUnavailable, WorkersError
from workers.jobs import JobState
from workers.jobs.reading import JobEventKind
from workers.queue import Queue

if TYPE_CHECKING:
    from workers.command.arguments import Commands

_CLEAR: Final = "\x1b[H\x1b[2J"
_SHOWN: Final = 15
_LOOKED_AT: Final = 1_000
"""At how many queued jobs a look asks whether a limit keeps them back."""
LEAST_SECONDS: Final = 0.1
_COUNTED: Final = (JobEventKind.QUEUED, JobEventKind.COMPLETED, JobEventKind.FAILING, JobEventKind.FAILED)


def add_to(commands: Commands) -> None:
    """Add the command to the parser."""
    told = "watch a queue: counts, rates, limits, workers, running jobs"
    parser = commands.add_parser("top", help=told, description=f"{told.capitalize()}. Ctrl-C ends it.")
    parser.add_argument("queue", metavar="QUEUE", help="module:queue, or a storage's URL")
    parser.add_argument(
        "--interval", type=checked(parse_duration), default="2s", metavar="DURATION", help="default: %(default)s"
    )
    parser.add_argument("--times", type=checked(positive), metavar="N", help="end after so many looks")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the queue again and again."""
    return asyncio.run(with_queue(options.queue, lambda queue: _watch(queue, options)))


async def _watch(queue: Queue, options: argparse.Namespace) -> int:
    loop, looks = asyncio.get_running_loop(), 0
    seconds = max(options.interval.total_seconds(), LEAST_SECONDS)
    await queue.counts()  # connects
    counting = _Counting(queue)
    task = asyncio.create_task(counting.run())
    since = loop.time()
    try:
        while options.times is None or looks < options.times:
            await asyncio.sleep(seconds)
            now = loop.time()
            text = await _screen(queue, counting.take(), now - since)
            since, looks = now, looks + 1
            print(f"{_CLEAR if sys.stdout.isatty() else ''}{text}\n", flush=True)
    finally:
        task.cancel()
        await asyncio.wait([task])
    return 0


class _Counting:
    """Counts the events of a queue's jobs."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._counts: Counter[JobEventKind] = Counter()

    def take(self) -> Counter[JobEventKind]:
        """Return what was counted since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    async def run(self) -> None:
        while True:
            try:
                async with AsyncExitStack() as stack:
                    subscription = await stack.enter_async_context(self._queue.storage.events())
                    while True:
                        self._counts[(await subscription.get()).kind] += 1
            except StorageUnavailable:  # the look itself says so
                await asyncio.sleep(1)


async def _screen(queue: Queue, events: Counter[JobEventKind], seconds: float) -> str:
    head = f"{queue.storage!r}  {datetime.now(UTC):%H:%M:%S} UTC"
    try:
        counts, paused = await queue.counts(), await queue.manage.is_paused()
        workers = await queue.manage.workers()
        look = await look_at_limits(queue, _LOOKED_AT)
        running = (await queue.manage.list(JobState.PROCESSING, limit=_SHOWN)).jobs
    except WorkersError as error:
        return f"{head}\n{type(error).__name__}: {error}"
    parts = [
        head + ("  paused" if paused else ""),
        table([state.value for state in counts], [[str(number) for number in counts.values()]]),
        "per second: " + ", ".join(f"{kind.value} {events[kind] / seconds:.1f}" for kind in _COUNTED),
    ]
    if look.limits:
        parts.append(limits_table(look))
    if workers:
        seen = [(each.id, str(each.claims), heard(each)) for each in workers[:_SHOWN]]
        parts.append(table(("worker", "running", ""), seen))
    if running:
        jobs = [(job.id, job.name, f"{job.attempt}/{job.max_attempts}", age(job.created_at)) for job in running]
        parts.append(table(("running job", "name", "attempt", "age"), jobs))
    return "\n\n".join(parts)
