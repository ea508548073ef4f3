"""What is done under which name: the page of tasks, and the same for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.responses import Response

from workers.dashboard.api import Listing, calls
from workers.dashboard.catalog import QueueCatalog, Queues
from workers.dashboard.rendering import MenuItem
from workers.dashboard.task_counts import SHOWN_STATES, TaskLine, look_at_tasks
from workers.dashboard.text import counted
from workers.dashboard.visit import PageCode, Visit

TASKS: Final = MenuItem(title="Tasks", path="/tasks")
MOST_LINES: Final = 200

api: Final = calls()


def tasks_page(queues: QueueCatalog) -> PageCode:
    """Return the page."""

    async def page(visit: Visit) -> Response:
        look = await look_at_tasks(queues)
        lines = look.lines[:MOST_LINES]
        shown = {
            "lines": lines,
            "left": len(look.lines) - len(lines),
            "problems": look.problems,
            "states": SHOWN_STATES,
            "lede": _lede(look.lines),
        }
        return visit.page("tasks.html", shown)

    return page


@api.get(TASKS.path)
async def list_tasks(queues: Queues) -> Listing[TaskLine]:
    """List what is done under which name, by a look at some jobs of each state of each queue."""
    return Listing(items=(await look_at_tasks(queues)).lines[:MOST_LINES])


def _lede(lines: Sequence[TaskLine]) -> tuple[str, str]:
    failing = [line for line in lines if line.failed]
    if not lines:
        return "No job is there.", "Jobs that are done may not be kept."
    first = f"{counted(len(failing), 'task')} failed." if failing else "No task failed."
    return first, f"{counted(len(lines), 'name')} in the queues."
