"""What is done under which name: the page of tasks, and the same for programs, from a bounded look at each queue.

No storage counts jobs by their names, or keeps when a run began. So a few hundred jobs are looked at, some of each
state of each queue; where a queue has more, the counts are of those, and it is said. The duration that can be told is
the time from when a job was made until it was done, of jobs that completed and are still kept.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from starlette.responses import Response

from workers.dashboard.api import Listing, calls
from workers.dashboard.catalog import NoAnswer, QueueCatalog, Queues
from workers.dashboard.rendering import MenuItem
from workers.dashboard.text import counted
from workers.dashboard.visit import PageCode, Visit
from workers.errors import WorkersError
from workers.jobs import JobState, JobStatus, Page

MOST_READ: Final = 900
"""How many jobs one look reads at most, of all queues together."""
HOUR: Final = timedelta(hours=1)
SHOWN_STATES: Final = tuple(state for state in JobState if state is not JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """What is done under one name in one queue.

    `counts` are of the jobs that were looked at; without `is_exact` the queue has more of them. `ended_last_hour` is
    how many completed in the last hour, None if not all that completed were looked at. `p50_ms` and `p95_ms` are from
    when a job was made until it was done, None where no completed job is kept. `workers` run on the queue.
    """

    queue: str
    name: str
    counts: Mapping[JobState, int]
    is_exact: bool
    ended_last_hour: int | None
    p50_ms: float | None
    p95_ms: float | None
    workers: int

    @property
    def failed(self) -> int:
        return self.counts[JobState.FAILED] + self.counts[JobState.FAILING]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLook:
    """The names of all queues, those with failures first; queues that do not answer, with what is wrong."""

    lines: Sequence[TaskLine]
    problems: Mapping[str, str]


async def look_at_tasks(queues: QueueCatalog) -> TaskLook:
    """Look at some jobs of each state of each queue."""
    names = [*queues]
    limit = max(MOST_READ // max(len(names) * len(SHOWN_STATES), 1), 1)
    found = await asyncio.gather(*(_look(queues, name, limit) for name in names))
    lines = [line for each in found if not isinstance(each, str) for line in each]
    lines.sort(key=lambda line: (-line.failed, line.queue, line.name))
    problems = {name: each for name, each in zip(names, found, strict=True) if isinstance(each, str)}
    return TaskLook(lines=lines, problems=problems)


async def _look(queues: QueueCatalog, queue: str, limit: int) -> Sequence[TaskLine] | str:
    """Return the names of one queue, or what is wrong with it."""
    line = await queues.line(queue)
    if line.problem is not None:
        return line.problem
    try:
        states = [state for state in SHOWN_STATES if line.counts[state]]
        pages = [await queues.jobs(queue, state, None, limit=limit) for state in states]
    except (WorkersError, NoAnswer) as error:
        return str(error)
    return _lines(queue, dict(zip(states, pages, strict=True)), len(line.alive))


def _lines(queue: str, pages: Mapping[JobState, Page], workers: int) -> Sequence[TaskLine]:
    by_name: dict[str, list[JobStatus]] = {}
    for page in pages.values():
        for job in page.jobs:
            by_name.setdefault(job.name, []).append(job)
    is_exact = all(page.cursor is None for page in pages.values())
    completed = pages.get(JobState.COMPLETED)
    knows_rate = completed is None or completed.cursor is None
    return [
        _line(queue, name, jobs, is_exact=is_exact, knows_rate=knows_rate, workers=workers)
        for name, jobs in by_name.items()
    ]


def _line(
    queue: str, name: str, jobs: Sequence[JobStatus], *, is_exact: bool, knows_rate: bool, workers: int
) -> TaskLine:
    counts = dict.fromkeys(JobState, 0)
    for job in jobs:
        counts[job.state] += 1
    since = datetime.now(UTC) - HOUR
    ends = [(job.created_at, job.finished_at) for job in jobs if job.state is JobState.COMPLETED and job.finished_at]
    took = sorted((end - made) / timedelta(milliseconds=1) for made, end in ends)
    return TaskLine(
        queue=queue,
        name=name,
        counts=counts,
        is_exact=is_exact,
        ended_last_hour=sum(end >= since for _, end in ends) if knows_rate else None,
        p50_ms=_at(took, 0.5),
        p95_ms=_at(took, 0.95),
        workers=workers,
    )


def _at(took: Sequence[float], part: float) -> float | None:
    """Return the duration that this part of them does not exceed."""
    return max(took[math.ceil(part * len(took)) - 1], 0.0) if took else None


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
