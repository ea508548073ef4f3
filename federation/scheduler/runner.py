"""Runs recurring jobs at their times, each on one process at a time; see `leases.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import structlog
from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy.exc import SQLAlchemyError

from db import RunOutcome
from federation.base.logs import crash
from federation.base.meter import NO_METER, Meter
from federation.scheduler.leases import Lease, Leases
from workers.clock import monotonic

T = TypeVar("T")

log = structlog.get_logger(__name__)

AT_ONCE: Final = timedelta(0)
ENDS_WITHIN: Final = timedelta(seconds=5)
FIRST_RUN: Final = timedelta(seconds=5)
STOPPED: Final = "its process was stopped"
"""The error of a run that nothing is wrong with."""
JITTER: Final = 0.1
"""The part of the interval by which each run varies, so that processes that started together spread out."""


class JobFailed(Exception):
    """Raised by a job that could not do its work, with a message that may be stored and logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringJob:
    """Work to be done every `interval`.

    `run` may be repeated, and cut off at any point; it returns what to log about it.
    """

    name: str
    does: str
    interval: timedelta
    run: Callable[[], Awaitable[Mapping[str, object]]]
    timeout: timedelta = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How one run of a job ended."""

    outcome: RunOutcome
    duration: timedelta
    detail: Mapping[str, object]


class JobRunner:
    """Runs one job, if it is this process's turn, once what `ready` returns has ended."""

    def __init__(
        self, leases: Leases, *, meter: Meter = NO_METER, ready: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._leases = leases
        self._meter = meter
        self._ready = ready

    async def __call__(self, job: RecurringJob, *, at_once: bool = False) -> Run | None:
        """Run the job until its end, its failure or its timeout.

        Return None if it is another process's, or not due yet. `at_once` runs it regardless of its last run, but never
        beside a run of another process. Every run is logged.

        Raises:
            SQLAlchemyError: the database did not say whose turn it is.
        """
        leases: list[Lease] = []

        async def take() -> None:
            if self._ready is not None:
                await self._ready()
            lease = await self._leases.take(job.name, interval=AT_ONCE if at_once else job.interval)
            leases.extend(() if lease is None else (lease,))

        try:
            await _to_its_end(take())
            if not leases:
                return None
            [lease] = leases
            started = monotonic()
            outcome, detail = await self._run(job, lease)
        except asyncio.CancelledError:  # this process stops: the next one need not wait for the lease to end
            for lease in leases:
                await self._leases.end(lease, RunOutcome.FAILED, json.dumps({"error": STOPPED}))
            raise
        run = Run(outcome=outcome, duration=timedelta(seconds=monotonic() - started), detail=detail)
        if not await _to_its_end(self._leases.end(lease, outcome, json.dumps(detail, default=str))):
            run = Run(outcome=RunOutcome.LOST, duration=run.duration, detail=detail)
        self._meter.scheduled(job.name, run.outcome)
        level = log.info if run.outcome is RunOutcome.DONE else log.warning
        level(
            "scheduler_job",
            job=job.name,
            outcome=run.outcome.value,
            duration_ms=round(run.duration / timedelta(milliseconds=1)),
            **detail,
        )
        return run

    async def _run(self, job: RecurringJob, lease: Lease) -> tuple[RunOutcome, Mapping[str, object]]:
        work = asyncio.ensure_future(job.run())
        renewals = asyncio.create_task(self._renew(lease, work))
        try:
            async with asyncio.timeout(job.timeout.total_seconds()):
                return RunOutcome.DONE, await work
        except TimeoutError:
            return RunOutcome.FAILED, {"error": f"did not end within {job.timeout}"}
        except asyncio.CancelledError:
            if renewals.done() and not renewals.cancelled():
                return RunOutcome.LOST, {"error": "another process took the job over"}
            raise
        except JobFailed as failure:
            return RunOutcome.FAILED, {"error": str(failure)}
        except Exception as error:
            log.error("scheduler_job_failed", job=job.name, **crash(error))
            return RunOutcome.FAILED, {"error": type(error).__name__}
        finally:
            work.cancel()
            renewals.cancel()
            await asyncio.wait([work, renewals])

    async def _renew(self, lease: Lease, work: asyncio.Future[Mapping[str, object]]) -> None:
        """Renew the lease until it is lost, then stop the work."""
        while True:
            await asyncio.sleep(self._leases.duration.total_seconds() / 3)
            try:
                if not await _to_its_end(self._leases.renew(lease)):
                    work.cancel()
                    return
            except SQLAlchemyError as error:
                log.warning("scheduler_lease_not_renewed", job=lease.job, error=type(error).__name__)


async def _to_its_end(step: Coroutine[Any, Any, T]) -> T:
    """Await a transaction. A cancellation waits for its end, a few seconds at most.

    Of one that is cancelled nobody knows what became of it, and SQLAlchemy may log that as an error.
    """
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=ENDS_WITHIN.total_seconds())
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody asks any more
        raise


class Scheduler:
    """Tries every job at its times, in this event loop, from `start` until `stop`."""

    def __init__(self, jobs: Sequence[RecurringJob], run: JobRunner) -> None:
        self.jobs = tuple(jobs)
        self._run = run
        # Its own executor would make a task of `_begin` that a stop may cancel before it has begun, and log that.
        self._scheduler = AsyncIOScheduler(timezone=UTC, executors={"default": DebugExecutor()})
        self._running: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Start the jobs: the first runs are due in a few seconds, further ones at each interval. Idempotent."""
        if self._scheduler.running:
            return
        for job in self.jobs:
            seconds = job.interval.total_seconds()
            self._scheduler.add_job(
                self._begin,
                "interval",
                args=[job],
                id=job.name,
                replace_existing=True,
                seconds=seconds,
                jitter=seconds * JITTER,
                next_run_time=datetime.now(UTC) + min(FIRST_RUN, job.interval),
                coalesce=True,
                misfire_grace_time=None,
            )
        self._scheduler.start()

    async def stop(self) -> None:
        """Stop all jobs, and cancel those under way."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, job: RecurringJob) -> None:
        """Start the job, unless it is still running: a job that outlasts its interval misses the times in between."""
        if job.name not in self._running:
            task = asyncio.create_task(self._try(job), name=f"scheduled-{job.name}")
            self._running[job.name] = task
            task.add_done_callback(lambda _: self._running.pop(job.name))

    async def _try(self, job: RecurringJob) -> None:
        try:
            await self._run(job)
        except SQLAlchemyError as error:
            log.warning("scheduler_job_not_taken", job=job.name, error=type(error).__name__)
