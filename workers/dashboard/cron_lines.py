"""What recurs in the queues, and what is done about it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from workers.crons import CronStatus, Missed
from workers.dashboard.catalog import NoAnswer, QueueCatalog, answer, told
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal
from workers.errors import Unsupported, WorkersError
from workers.queue import Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class CronLine:
    """What recurs in one queue, by a cron `pattern` or `every` so often, as a job of the name `job`.

    `due` is its next time, null while it is paused, and once it never comes again; `last` is the last time that had its
    turn, null if there was none or nobody knows. `missed` says what becomes of times at which no worker was there. On
    BullMQ nothing is `pausable`.
    """

    queue: str
    name: str
    job: str
    pattern: str | None
    every: timedelta | None
    timezone: str
    version: int
    missed: Missed
    pausable: bool
    paused: bool
    due: datetime | None
    last: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringLook:
    """What recurs in all queues, those that keep none left out; queues that do not answer, with what is wrong."""

    lines: Sequence[CronLine]
    problems: Mapping[str, str]
    keepers: int
    """How many queues are on a storage that keeps what recurs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CronAction:
    """Something that is done about what recurs, in the words of a button, a question and a report."""

    verb: str
    asks: str
    means: str
    done: str
    is_grave: bool = False


CRON_ACTIONS: Final[Mapping[str, CronAction]] = {
    "pause": CronAction(
        verb="Pause",
        asks="Pause {}?",
        means="Nothing is enqueued for it, by any process, until it goes on. What it misses is not made up for.",
        done="It is paused.",
    ),
    "resume": CronAction(
        verb="Go on", asks="Let {} go on?", means="Its next time is the first from now.", done="It goes on."
    ),
    "run": CronAction(
        verb="Run now",
        asks="Run {} now?",
        means="One job is enqueued, paused or not. When it recurs stays as it is.",
        done="Its job is queued.",
    ),
    "remove": CronAction(
        verb="Remove",
        asks="Remove {}?",
        means="It does not recur any more; jobs of it that are queued stay. A process that declares it does not bring "
        "it back, unless with a higher version.",
        done="It does not recur any more.",
        is_grave=True,
    ),
}


def fitting(line: CronLine) -> Sequence[str]:
    """Return the actions that make a difference to it."""
    turned = "resume" if line.paused else "pause"
    return (turned, "run", "remove") if line.pausable else ("run", "remove")


async def look_at_crons(queues: QueueCatalog) -> RecurringLook:
    """Look at what recurs in each queue whose storage keeps that."""
    names = [name for name in queues if queues.named(name).storage.capabilities.crons]
    found = await asyncio.gather(*(_look(queues, name) for name in names))
    return RecurringLook(
        lines=[line for each in found if not isinstance(each, str) for line in each],
        problems={name: each for name, each in zip(names, found, strict=True) if isinstance(each, str)},
        keepers=len(names),
    )


async def _look(queues: QueueCatalog, name: str) -> Sequence[CronLine] | str:
    """Return what recurs in one queue, or what is wrong with it."""
    queue = queues.named(name)
    try:
        return [_line(name, queue, each) for each in await answer(queue.crons.list())]
    except (WorkersError, NoAnswer) as error:
        return told(error) or ""


def _line(name: str, queue: Queue, status: CronStatus) -> CronLine:
    cron = status.cron
    return CronLine(
        queue=name,
        name=cron.name,
        job=cron.job,
        pattern=cron.pattern,
        every=cron.every,
        timezone=cron.timezone,
        version=cron.version,
        missed=cron.missed,
        pausable=queue.storage.capabilities.cron_rows,
        paused=status.paused,
        due=status.due,
        last=status.last,
    )


def keeper(queues: QueueCatalog, name: str) -> Queue:
    """Return the queue of that name.

    Raises:
        Refusal: there is none, or its storage keeps nothing that recurs.
    """
    queue = queues.named(name)
    if not queue.storage.capabilities.crons:
        raise Refusal(409, "This queue keeps nothing that recurs.")
    return queue


async def act_on_cron(queue: Queue, key: str, name: str) -> tuple[bool, str | None]:
    """Do it, and return whether it recurred at all; and the id of the job that was enqueued.

    Raises:
        Refusal: the storage cannot do this.
    """
    verbs = {"pause": queue.crons.pause, "resume": queue.crons.resume, "remove": queue.crons.remove}
    try:
        if key == "run":
            job_id = await answer(queue.crons.run_now(name))
            return job_id is not None, job_id
        return await answer(verbs[key](name)), None
    except Unsupported as error:
        raise Refusal(409, short(str(error), 400)) from None
