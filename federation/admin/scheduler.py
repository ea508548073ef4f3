"""What an administrator does with recurring work: see it, and run it at once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from db import RunOutcome, SchedulerJob, new_id
from federation.base.audit import Order, recorded
from federation.runtime.recurring_jobs import recurring_jobs
from federation.scheduler.leases import Leases, last_runs
from federation.scheduler.runner import JobRunner, Run

if TYPE_CHECKING:
    from federation.runtime.composition import Federation


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A recurring job and its last run. While it runs it has begun, and has no outcome or an earlier run's."""

    name: str
    does: str
    every: timedelta
    started_at: datetime | None
    finished_at: datetime | None
    leased_until: datetime | None
    outcome: RunOutcome | None
    detail: str | None


async def list_jobs(federation: Federation) -> list[JobRow]:
    """Return the recurring jobs of this node."""
    runs = {run.name: run for run in await last_runs(federation.database)}
    found = []
    for job in recurring_jobs(federation):
        last = runs.get(job.name) or SchedulerJob(name=job.name)
        found.append(
            JobRow(
                name=job.name,
                does=job.does,
                every=job.interval,
                started_at=last.started_at,
                finished_at=last.finished_at,
                leased_until=last.leased_until,
                outcome=last.outcome,
                detail=last.detail,
            )
        )
    return found


async def run(federation: Federation, name: str, *, order: Order | None = None) -> Run | None:
    """Run the job to its end. Return None if another process is running it at this moment.

    Raises:
        LookupError: there is no job of that name; the message says which there are.
    """
    jobs = {job.name: job for job in recurring_jobs(federation)}
    if name not in jobs:
        raise LookupError(f"there is no recurring job {name!r}; there are {', '.join(jobs)}")
    async with recorded(federation.database, order) as record:
        done = await JobRunner(Leases(federation.database, holder=new_id()))(jobs[name], at_once=True)
        if done is not None and done.outcome is RunOutcome.DONE:
            await federation.database.transact(lambda connection: record.add(connection, 1))
    return done
