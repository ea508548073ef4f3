"""Recurring work: what it does, how it went last, and running it now."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import structlog
from starlette.responses import Response

from db import RunOutcome
from federation.admin import scheduler
from federation.admin.scheduler import JobRow
from federation.base.audit import Order
from federation.dashboard.orders import Node, api_order, command, ordered
from federation.scheduler.words import in_words, stored_in_words
from workers.dashboard.api import ApiAnswer, ApiOrder, Caller, Listing, Text, calls, given
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.text import short
from workers.dashboard.visit import Confirmation, Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation
    from federation.scheduler.runner import Run

log = structlog.get_logger(__name__)

SCHEDULER: Final = MenuItem(title="Scheduler", path="/scheduler")
WAITS: Final = 3.0
"""Seconds that a page waits for the end of a run; one that takes longer goes on without it."""


api: Final = calls()


class RunOrder(ApiOrder):
    """Which recurring job is to run."""

    name: Text


class RunBegun(ApiAnswer):
    """What became of it within three seconds; no outcome yet if it runs on, here or in another process."""

    name: str
    outcome: RunOutcome | None
    told: str


class SchedulerPages:
    """The page, and the runs that it has begun."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._runs: dict[str, asyncio.Task[Run | None]] = {}

    def part(self) -> SitePart:
        """Return the page, and the calls."""
        return SitePart(
            menu=(SCHEDULER,),
            pages={SCHEDULER.path: self.all},
            actions={"/scheduler/run": self.run},
            calls=api.routes,
            gives=(self,),
        )

    async def close(self) -> None:
        """End the runs that are under way; another process takes them over when they are due."""
        for run in self._runs.values():
            run.cancel()
        if self._runs:
            await asyncio.wait(self._runs.values())

    async def all(self, visit: Visit) -> Response:
        """Show the recurring jobs of the node."""
        jobs = await scheduler.list_jobs(self._federation)
        now = datetime.now(UTC)
        running = {job.name for job in jobs if job.leased_until is not None and job.leased_until > now}
        failed = [job.name for job in jobs if job.outcome is RunOutcome.FAILED]
        shown = {
            "jobs": [(job, stored_in_words(job.detail)) for job in jobs],
            "running": running,
            "failed": failed,
            "command": command("scheduler", "list"),
        }
        return visit.page("scheduler.html", shown)

    async def run(self, visit: Visit) -> Response:
        """Run one of them now, in this process."""
        name = visit.field("name")
        jobs = {job.name: job for job in await scheduler.list_jobs(self._federation)}
        if name not in jobs:
            raise Refusal(404, "There is no such recurring job.")
        if not visit.is_confirmed:
            return visit.confirm(
                Confirmation(
                    question=f"Run {name} now?",
                    rows=f"1 job, whenever it last ran: {jobs[name].does}. It runs in the dashboard's process.",
                    verb="Run now",
                    back=SCHEDULER.path,
                    command=command("scheduler", "run", name),
                )
            )
        run = await self.begun(name, ordered(visit, "scheduler run", name=name))
        return visit.back(SCHEDULER.path, _told(name, run))

    async def begun(self, name: str, order: Order) -> asyncio.Task[Run | None]:
        """Run it unless it runs already, and wait a moment for its end."""
        run = self._runs.get(name)
        if run is None or run.done():
            run = self._runs[name] = asyncio.create_task(self._run(name, order), name=f"dashboard-run-{name}")
        await asyncio.wait([run], timeout=WAITS)
        return run

    async def _run(self, name: str, order: Order) -> Run | None:
        try:
            return await scheduler.run(self._federation, name, order=order)
        except Exception:  # whatever it is: nobody else may await the task
            log.exception("dashboard_run_failed", job=name)
            raise


@api.get(SCHEDULER.path)
async def list_jobs(node: Node) -> Listing[JobRow]:
    """List the recurring jobs of the node, and how each went last."""
    return Listing(items=await scheduler.list_jobs(node))


@api.post("/scheduler/run")
async def run_job(
    node: Node, caller: Caller, pages: Annotated[SchedulerPages, given(SchedulerPages)], asked: RunOrder
) -> RunBegun:
    """Run a recurring job now, in the dashboard's process. A long run goes on after the answer."""
    if asked.name not in {job.name for job in await scheduler.list_jobs(node)}:
        raise Refusal(404, "There is no such recurring job.")
    run = await pages.begun(asked.name, api_order(caller, "scheduler run", name=asked.name))
    done = run.result() if run.done() and run.exception() is None else None
    return RunBegun(name=asked.name, outcome=None if done is None else done.outcome, told=_told(asked.name, run))


def _told(name: str, run: asyncio.Task[Run | None]) -> str:
    if not run.done():
        return f"{name} is running; this page shows how it ends."
    if run.exception() is not None:
        return f"{name} could not be run: see the dashboard's log."
    done = run.result()
    if done is None:
        return f"{name} is running in another process at this moment."
    told = short(in_words(done.detail), 200)
    return f"{name}: {done.outcome.value} after {done.duration.total_seconds():.1f} s: {told}."
