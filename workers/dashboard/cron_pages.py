"""What recurs: the page of all queues' crons, pausing one, running it now, removing it; and the same for programs."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias

from starlette.responses import Response

from workers.crons import CronStatus, Missed
from workers.dashboard.api import ApiAnswer, ApiOrder, Caller, Listing, Text, calls
from workers.dashboard.catalog import NoAnswer, QueueCatalog, Queues, answer, told
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.text import counted, short
from workers.dashboard.visit import Confirmation, Refusal, Visit
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


CronCommand: TypeAlias = Callable[[str, Queue, str], str]
"""Returns the command that does the same: to what recurs in which queue."""

RECURRING: Final = MenuItem(title="Recurring", path="/recurring")
MOST_LINES: Final = 200

api: Final = calls()


def cron_command(verb: str, queue: Queue, name: str) -> str:
    """Return the command that does the same; in the one process that sees a queue in memory, Python does it."""
    if queue.storage.capabilities.processes == "one":
        return f"await queue.crons.{'run_now' if verb == 'run' else verb}({name!r})  # queue {queue.storage.queue!r}"
    words = shlex.join(["python", "-m", "workers", "crons", verb, "QUEUE", name])
    return f"{words}  # QUEUE: module:queue, or the URL of {queue.storage.queue!r}"


class CronOrder(ApiOrder):
    """What is to be done about what recurs."""

    queue: Text
    name: Text
    action: Literal["pause", "resume", "run", "remove"]


class CronDone(ApiAnswer):
    """What was done; `done` is false if nothing of that name recurs there. `job` is what `run` has enqueued."""

    queue: str
    name: str
    action: str
    done: bool
    job: str | None


def cron_part(queues: QueueCatalog, *, command: CronCommand = cron_command) -> SitePart:
    """Return the page, and the calls."""
    pages = CronPages(queues, command)
    return SitePart(
        menu=(RECURRING,),
        pages={RECURRING.path: pages.all},
        actions={RECURRING.path: pages.act},
        calls=api.routes,
    )


class CronPages:
    """What the page shows and does."""

    def __init__(self, queues: QueueCatalog, command: CronCommand) -> None:
        self._queues = queues
        self._command = command

    async def all(self, visit: Visit) -> Response:
        """Show what recurs in all queues."""
        look = await look_at_crons(self._queues)
        lines = look.lines[:MOST_LINES]
        shown = {
            "lines": [(line, {key: CRON_ACTIONS[key].verb for key in fitting(line)}) for line in lines],
            "left": len(look.lines) - len(lines),
            "problems": look.problems,
            "lede": _lede(look),
        }
        return visit.page("recurring.html", shown)

    async def act(self, visit: Visit) -> Response:
        """Pause, resume, run or remove something that recurs."""
        queue_name, name, key = visit.carried("queue"), visit.carried("name"), visit.field("action")
        queue, action = keeper(self._queues, queue_name), CRON_ACTIONS.get(key)
        if action is None:
            raise Refusal(400, "There is no such action.")
        if not visit.is_confirmed:
            asked = Confirmation(
                question=action.asks.format(short(name, 100)),
                rows=f"1 cron of queue {short(queue_name)}. {action.means}",
                verb=action.verb,
                back=RECURRING.path,
                command=self._command(key, queue, name),
                is_grave=action.is_grave,
            )
            return visit.confirm(asked)
        done, _ = await act_on_cron(queue, key, name)
        await visit.record(f"crons {key}", f"{queue_name}: {name}", int(done))
        told = action.done if done else "nothing of that name recurs there any more."
        return visit.back(RECURRING.path, f"{short(name, 100)}: {told[0].lower()}{told[1:]}")


@api.get(RECURRING.path)
async def list_crons(queues: Queues) -> Listing[CronLine]:
    """List what recurs in the queues that answer."""
    look = await look_at_crons(queues)
    if look.keepers and len(look.problems) == look.keepers:
        raise Refusal(503, " ".join(look.problems.values()))
    return Listing(items=look.lines)


@api.post(RECURRING.path)
async def act_on_crons(queues: Queues, caller: Caller, asked: CronOrder) -> CronDone:
    """Pause or resume what recurs, run it now, or remove it."""
    done, job = await act_on_cron(keeper(queues, asked.queue), asked.action, asked.name)
    await caller.record(f"crons {asked.action}", f"{asked.queue}: {asked.name}", int(done))
    return CronDone(queue=asked.queue, name=asked.name, action=asked.action, done=done, job=job)


def _lede(look: RecurringLook) -> tuple[str, str]:
    paused = sum(line.paused for line in look.lines)
    if not look.keepers:
        return "These queues keep nothing that recurs.", "Their storages cannot."
    if not look.lines:
        return "Nothing recurs.", "An application declares what does."
    verb = "recurs" if len(look.lines) == 1 else "recur"
    return f"{counted(len(look.lines), 'cron')} {verb}.", f"{paused} paused." if paused else "None is paused."
