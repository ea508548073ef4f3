"""The doctor's checks of time: whose clock is off, what did not run when it was due, and whether things may expire."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import bindparam, select
from sqlmodel import col

from db import ProcessClock, RunOutcome, SchedulerJob
from federation.admin.doctor.checks import Found, failure, note, ok, queue_setting, warning
from federation.admin.words import ago
from federation.base.database_clock import INTERVAL, is_alive
from federation.runtime.composition import Federation
from federation.runtime.recurring_jobs import recurring_jobs
from federation.scheduler.leases import LEASE, last_runs
from federation.scheduler.runner import STOPPED, RecurringJob

CLOCK_WARNING: Final = timedelta(seconds=2)
CLIENTS_CLOCK_WARNING: Final = timedelta(seconds=1)
"""The same where the delays of jobs go by each client's clock."""
CLOCK_FAILURE: Final = timedelta(minutes=1)
MISSED_RUNS: Final = 3
RECENT: Final = 3 * INTERVAL
"""A process that has not written down its time for longer has stopped."""


async def clock(federation: Federation) -> Found:
    database = await _database_skew(federation)
    skews = {"the database's clock differs from ours": database}
    redis = None
    if federation.redis is not None:
        from redis.exceptions import RedisError  # here: a node without a Redis need not have it

        try:
            before = datetime.now(UTC)
            seconds, micros = await federation.redis.time()
        except (RedisError, OSError) as error:
            text = f"Redis did not tell the time: {type(error).__name__}"
            return failure(text, f"is {queue_setting(federation)} right, and the server up?")
        redis = _skew(datetime.fromtimestamp(seconds + micros / 1e6, UTC), before)
        skews["Redis' clock differs from ours"] = redis
    skews |= await _process_skews(federation, datetime.now(UTC) + database)
    what, skew = max(skews.items(), key=lambda each: abs(each[1]))
    text = f"{what} by {abs(skew.total_seconds()):.1f} s"
    if abs(skew) >= CLOCK_FAILURE:
        return failure(text, "set the clocks by NTP: delays, leases and purges go by them")
    if redis is not None and abs(redis) >= CLIENTS_CLOCK_WARNING and _goes_by_clients_clocks(federation):
        return warning(text, "set the clocks by NTP: on BullMQ the delays of jobs go by this machine's clock")
    if abs(skew) >= CLOCK_WARNING:
        return warning(text, "set the clocks by NTP")
    return ok(text)


async def _database_skew(federation: Federation) -> timedelta:
    if not federation.database.has_clock:
        return timedelta(0)  # the database's clock is this machine's
    before = datetime.now(UTC)
    return _skew(await federation.database.time(), before)


async def _process_skews(federation: Federation, now: datetime) -> dict[str, timedelta]:
    """Return by how much the clock of each process that delivers is off, by what it wrote down.

    `now` is the database's time. On SQLite a process has no other clock than its own to compare with: there it is seen
    if it is ahead of ours.
    """
    found = await federation.database.rows(_CLOCKS, {"since": now - RECENT})
    rows = [row for row in found if is_alive(row.process)]
    ahead = {row.process: row.database_at - now for row in rows if row.database_at > now}
    return {
        f"the clock of process {row.process} differs from the database's": row.machine_at - row.database_at
        if federation.database.has_clock
        else ahead.get(row.process, timedelta(0))
        for row in rows
    }


def _goes_by_clients_clocks(federation: Federation) -> bool:
    return federation.delivery_queue.storage.capabilities.clock == "client"


def _skew(told: datetime, before: datetime) -> timedelta:
    """Return by how much the clock of a server that was asked at `before`, and has answered by now, is off at least."""
    none = timedelta(0)
    return max(told - datetime.now(UTC), none) + min(told - before, none)


async def scheduler(federation: Federation) -> Found:
    runs = {run.name: run for run in await last_runs(federation.database)}
    if not runs:
        return note("no recurring job has run yet; the first `federation run` begins with them")
    now = datetime.now(UTC) + await _database_skew(federation)
    jobs = recurring_jobs(federation)
    late = [job.name for job in jobs if _is_late(job, runs.get(job.name), now)]
    failed = {
        job.name: error
        for job in jobs
        if (run := runs.get(job.name)) is not None
        and run.outcome is RunOutcome.FAILED
        and (error := _error_of(run.detail)) != STOPPED  # the next run is another process's
    }
    told = [f"not run when they were due: {', '.join(late)}"] if late else []
    if failed:
        told.append(f"failed at their last run: {', '.join(f'{name} ({why})' for name, why in failed.items())}")
    if told:
        question = "does `federation workers run` run? " if late else ""
        return warning("; ".join(told), f"{question}`federation scheduler run NAME` runs one now")
    return ok("every recurring job ran when it was due, and well")


def _is_late(job: RecurringJob, run: SchedulerJob | None, now: datetime) -> bool:
    """Tell whether the job did not run when it was due, whoever holds its lease.

    A run may take as long as its timeout, if its lease is one that may have been taken by now. A run that is yet to
    come was noted by a wrong clock.
    """
    if run is None or run.started_at is None or run.started_at > now + CLOCK_WARNING:
        return True
    is_running = run.leased_until is not None and now < run.leased_until <= now + LEASE + CLOCK_WARNING
    return now - run.started_at > MISSED_RUNS * job.interval + LEASE + (job.timeout if is_running else timedelta(0))


def _error_of(detail: str | None) -> str:
    try:
        return str(json.loads(detail or "{}").get("error", "?"))
    except (ValueError, AttributeError):
        return "?"


async def sweeps(federation: Federation) -> Found:
    last = await federation.sweeps.last()
    now = datetime.now(UTC) + await _database_skew(federation)
    if await federation.outbox_sweeper.lacks_jobs():
        return warning(
            "deliveries are ready, and there is no job in the queue: it has lost its data",
            "a process that delivers adds the jobs within a minute; does `federation workers run` run?",
        )
    if last is None:
        return note("nothing was swept yet; the first `federation run` begins with it")
    if last.spares_seconds:
        left = ago(timedelta(seconds=last.spares_seconds))
        return warning(
            f"more than an hour passed between two sweeps: nothing expires or is purged for {left} more of sweeping",
            "is this machine's clock right? If it is, `federation deliveries expire` ends this",
        )
    return ok(f"the last sweep was {ago(max(now - last.swept_at, timedelta(0)))} ago, and the queue has its jobs")


_CLOCKS: Final = select(col(ProcessClock.process), col(ProcessClock.machine_at), col(ProcessClock.database_at)).where(
    col(ProcessClock.database_at) > bindparam("since")
)
