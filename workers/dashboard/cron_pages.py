"""What recurs: the page of all queues' crons, pausing one, running it now, removing it; and the same for programs."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from starlette.responses import Response

from workers.dashboard.api import ApiAnswer, ApiOrder, Caller, Listing, Text, calls
from workers.dashboard.catalog import QueueCatalog, Queues
from workers.dashboard.cron_lines import (
    CRON_ACTIONS,
    CronLine,
    RecurringLook,
    act_on_cron,
    fitting,
    keeper,
    look_at_crons,
)
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.text import counted, short
from workers.dashboard.visit import Confirmation, Refusal, Visit
from workers.queue import Queue

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
