"""The workers of a process: how they start, report and stop."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol, TypeAlias

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from db import new_id
from federation.activitypub.handlers import HANDLERS
from federation.base.database_clock import INTERVAL as CLOCK_INTERVAL
from federation.base.database_clock import DatabaseClock
from federation.base.logs import crash
from federation.base.queues.job_data import FederationDeliveryJob
from federation.base.queues.queue import (
    DISCOVERY_QUEUE_NAME,
    HEALTH_CHECK_QUEUE_NAME,
    TASKS_QUEUE_NAME,
    delivery_backoff,
)
from federation.delivery.errors import Held, PermanentFailure, RetryableFailure, Superseded
from federation.delivery.held.release import LOOKS
from federation.delivery.ledger.entries import Abandoned
from federation.delivery.rows import row_of_job
from federation.delivery.sightings import INTERVAL
from federation.runtime.composition import Federation
from federation.runtime.nodes import allow_descriptors
from federation.runtime.recurring_jobs import recurring_jobs
from federation.runtime.tending import Tending, Tick
from federation.scheduler.leases import Leases
from federation.scheduler.runner import JobRunner, RecurringJob, Scheduler
from workers import Handler, Queue, Worker, WorkerOptions, WorkersError
from workers.clock import monotonic
from workers.errors import StalledError
from workers.jobs import Claim
from workers.storage.base import ANY_NAME
from workers.worker.events import Observer, WorkerEvent, WorkerEventKind
from workers.worker.handlers import Middleware

log = structlog.get_logger(__name__)

NO_TASKS: Final[Mapping[str, Handler]] = {}
NO_TICKS: Final[Mapping[Tick, timedelta]] = {}
LOST_LEASES: Final = 5
LOST_WITHIN: Final = timedelta(minutes=1)
"""So many lost leases within this time mean that the queue has lost its data: one alone is lost now and then."""
PROBING: Final = timedelta(seconds=1)
"""The time between two looks for absent servers that are due to be probed."""


class Schedule(Protocol):
    """Runs recurring jobs from `start` until `stop`."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


MakeSchedule: TypeAlias = Callable[[Sequence[RecurringJob], JobRunner], Schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A worker that is running."""

    worker: Worker
    task: asyncio.Task[None]

    async def stop(self) -> None:
        """Stop the worker: it claims no more, lets handlers finish within the grace, and gives the rest back.

        Raises:
            Exception: what had ended the worker before.
        """
        self.worker.stop()
        await self.task


class FederationWorkers:
    """The delivery worker and the health-check worker of one node, and what they need.

    That is the discovery worker, which lives as long as the delivery worker, and the scheduler. Each further queue of
    deliveries has a delivery worker of its own, with as many slots: they share the room for slow servers, and what is
    known of those. With `tasks`, or with ActivityPub, there is a worker for these, too. `schedule` makes what runs the
    recurring jobs at their times. Of several processes of one supervisor only the one that is told to `lead` runs them:
    the others are made without `leads`. `ticks` are run beside the workers, each at its interval.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        tasks: Mapping[str, Handler] = NO_TASKS,
        observers: Sequence[Observer] = (),
        schedule: MakeSchedule = Scheduler,
        leads: bool = True,
        ticks: Mapping[Tick, timedelta] = NO_TICKS,
    ) -> None:
        self._federation = federation
        self._leads = leads
        own = {} if federation.activitypub is None else federation.activitypub.handlers
        self._tasks = {**tasks, **own}
        self._observers = tuple(observers)
        self._running: tuple[RunningWorker, RunningWorker] | None = None
        self._beside: tuple[RunningWorker, ...] = ()  # the delivery workers of further queues
        self._discovering: RunningWorker | None = None
        self._working: RunningWorker | None = None
        self._stop_requested = False
        self._rows = RowKeeper(federation)
        self._losses = QueueLosses(federation)
        clock = federation.clock if isinstance(federation.clock, DatabaseClock) else None
        # A machine's clock may be hours off: nothing is looked at or moved on by it before the database's is known.
        ready = None if clock is None else clock.ensure
        self._tending = Tending(
            {
                federation.link_probes.tick: PROBING,
                federation.releaser.tick: LOOKS,
                federation.sightings.tick: INTERVAL,
                **({} if clock is None else {clock.tick: CLOCK_INTERVAL}),
                **ticks,
            },
            ready=ready,
        )
        leases = Leases(federation.database, holder=new_id(), clock=federation.clock)
        self._scheduler = schedule(recurring_jobs(federation), JobRunner(leases, meter=federation.meter, ready=ready))

    def start(self) -> tuple[RunningWorker, RunningWorker]:
        """Start both workers. Until both have stopped, a second call returns the same pair."""
        if self._running is None or all(running.task.done() for running in self._running):
            self._allow_descriptors()
            self._miss_functions()
            log.info(
                "workers_started", database=str(self._federation.database), queues=self._federation.sightings.place
            )
            first, *further = self._federation.delivery_queues.all
            delivery = _run(self._delivery_worker(first))
            self._beside = tuple(_run(self._delivery_worker(queue)) for queue in further)
            self._running = delivery, _run(self._health_check_worker())
            self._discovering = discovering = _run(self._discovery_worker())
            # Deliveries that are allowed to finish may wait for a discovery.
            delivery.task.add_done_callback(lambda _: discovering.worker.stop())
            delivery.task.add_done_callback(self._stop_beside)
            if self._tasks and (self._working is None or self._working.task.done()):
                self._working = _run(self._tasks_worker())
            self._stop_requested = False
            if self._leads:
                self._scheduler.start()
            self._tending.start()
        return self._running

    def lead(self) -> None:
        """Run the recurring jobs here from now on; the leases of any other process that does are respected."""
        self._leads = True
        if self._running is not None and not self._stop_requested:
            self._scheduler.start()

    def _stop_beside(self, first: asyncio.Task[None]) -> None:
        """Stop the further delivery workers where only the first was told to; otherwise all are, with their grace."""
        if not self._stop_requested and not first.cancelled() and first.exception() is None:
            for running in self._beside:
                running.worker.stop()

    def _allow_descriptors(self) -> None:
        found = allow_descriptors(self._federation.settings)
        if found.advice is not None:
            log.warning("too_few_descriptors", needed=found.needed, allowed=found.allowed, advice=found.advice)

    def _miss_functions(self) -> None:
        if self._federation.activitypub is not None and not HANDLERS:
            log.error("activity_functions_missing", advice="name the modules that declare them in FEDERATION_TASKS")

    def _delivery_worker(self, queue: Queue) -> Worker:
        settings = self._federation.settings
        return Worker(
            self._federation.worker_storage(queue.storage.queue),
            {ANY_NAME: self._federation.shared_delivery_processor},
            concurrency=settings.federation_delivery_concurrency,
            lease=settings.federation_lease,
            observers=[log_event, self._rows, self._losses, *self._observers],
            options=WorkerOptions(
                middlewares=_traces(),
                overtime=settings.federation_overtime,
                not_ready=self._not_ready,
                grace=settings.federation_grace,
                max_stalls=settings.federation_max_stalls,
                retry=delivery_backoff(settings),
            ),
        )

    def _not_ready(self) -> Coroutine[object, object, None] | None:
        """Return what to wait for before a delivery is claimed: the database, and its time."""
        return self._time_unknown() or self._federation.database_watch.not_ready()

    def _time_unknown(self) -> Coroutine[object, object, None] | None:
        """Return what to wait for before anything is claimed whose handler looks at the clock."""
        clock = self._federation.clock
        return clock.known() if isinstance(clock, DatabaseClock) and not clock.is_known else None

    def _health_check_worker(self) -> Worker:
        settings = self._federation.settings
        return Worker(
            self._federation.worker_storage(HEALTH_CHECK_QUEUE_NAME),
            {ANY_NAME: self._federation.health_check_processor},
            concurrency=settings.federation_health_concurrency,
            lease=settings.federation_lease,
            observers=[log_event, *self._observers],
            options=WorkerOptions(middlewares=_traces(), not_ready=self._time_unknown, grace=settings.federation_grace),
        )

    def _discovery_worker(self) -> Worker:
        settings = self._federation.settings
        return Worker(
            self._federation.worker_storage(DISCOVERY_QUEUE_NAME),
            {ANY_NAME: self._federation.discovery_processor},
            concurrency=settings.federation_discovery_concurrency,
            lease=settings.federation_lease,
            observers=[log_event, *self._observers],
            options=WorkerOptions(
                middlewares=_traces(),
                not_ready=self._time_unknown,
                overtime=settings.federation_overtime,
                grace=timedelta(0),  # when it is stopped, nobody waits for its jobs any more
            ),
        )

    def _tasks_worker(self) -> Worker:
        settings = self._federation.settings
        return Worker(
            self._federation.worker_storage(TASKS_QUEUE_NAME),
            self._tasks,
            concurrency=settings.federation_tasks_concurrency,
            lease=settings.federation_lease,
            observers=[log_event, *self._observers],
            options=WorkerOptions(middlewares=_traces(), grace=settings.federation_grace),
        )

    def request_stop(self) -> None:
        """Ask all workers to stop. A second request skips their grace."""
        self._stop_requested = True
        for running in (*(self._running or ()), *self._beside, self._working):
            if running is not None:
                running.worker.stop()

    async def wait(self) -> None:
        """Wait until all have stopped. If one fails, or this call is cancelled, the others are stopped.

        Raises:
            ExceptionGroup: what ended a worker.
        """
        everyone = (*(self._running or ()), *self._beside, self._discovering, self._working)
        tasks = [running.task for running in everyone if running is not None]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._request_stop_once()
            errors = [error for error in await asyncio.gather(*tasks, return_exceptions=True) if error is not None]
            await self._scheduler.stop()
            await self._tending.stop()
            await self._rows.close()
            await self._losses.close()
        if errors:
            raise BaseExceptionGroup("a worker ended", errors)

    async def stop(self) -> None:
        """Stop all workers in their three phases. Idempotent."""
        if self._running is not None:
            self._request_stop_once()
            await self.wait()
            self._running = None

    def _request_stop_once(self) -> None:
        if not self._stop_requested:
            self.request_stop()


def _traces() -> Sequence[Middleware]:
    """Return what makes spans of attempts, in a process that has loaded OpenTelemetry; no other one pays for it."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from workers.middlewares.opentelemetry import trace_attempts

    return (trace_attempts(),)


def _run(worker: Worker) -> RunningWorker:
    task = asyncio.create_task(worker.run(), name=f"worker-{worker.worker_id}")
    task.add_done_callback(_log_end)
    return RunningWorker(worker=worker, task=task)


def _log_end(task: asyncio.Task[None]) -> None:
    """Log the error that ended a worker: it may be weeks before anybody awaits its task."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("worker_died", worker=task.get_name(), error=_message(error), **crash(error))


class RowKeeper:
    """Holds the delivery of a job that ended without a decision by its attempt: its worker disappeared too often."""

    def __init__(self, federation: Federation) -> None:
        self._ledger = federation.ledger
        self._clock = federation.clock
        self._writing: set[asyncio.Task[None]] = set()

    def __call__(self, event: WorkerEvent) -> None:
        if event.kind is not WorkerEventKind.FAILED:
            return
        if event.claim is None:
            for job_id in event.job_ids:
                self._write(self._hold(row_of_job(job_id), job_id))
        elif isinstance(event.error, StalledError):
            self._write(self._hold(_delivery_of(event.claim), event.claim.job_id))

    async def close(self) -> None:
        """Wait until what was begun is written."""
        await asyncio.gather(*self._writing)

    def _write(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _hold(self, delivery_id: str, job_id: str) -> None:
        reason = "its worker disappeared with it too often; look for a crash in the worker's log"
        now = self._clock.now()
        entry = Abandoned(delivery_id=delivery_id, job_id=job_id, at=now, until=now, error=reason)
        try:
            await self._ledger.abandoned(entry)
        except Exception as error:  # the row is ready although its job has ended: the sweeper gives it another one
            log.error("delivery_row_not_held", delivery_id=delivery_id, **crash(error))


class QueueLosses:
    """Has the sweep ask for all jobs again, where a worker has lost the leases of several at once."""

    def __init__(self, federation: Federation) -> None:
        self._sweeps = federation.sweeps
        self._clock = federation.clock
        self._lost: deque[float] = deque(maxlen=LOST_LEASES)
        self._noting: asyncio.Task[None] | None = None

    def __call__(self, event: WorkerEvent) -> None:
        if event.kind is not WorkerEventKind.LEASE_LOST:
            return
        now = monotonic()
        self._lost.append(now)
        is_recent = now - self._lost[0] <= LOST_WITHIN.total_seconds()
        if len(self._lost) == LOST_LEASES and is_recent and (self._noting is None or self._noting.done()):
            self._noting = asyncio.create_task(self._note())

    async def close(self) -> None:
        """Wait until what was begun is written."""
        if self._noting is not None:
            await self._noting

    async def _note(self) -> None:
        try:
            if await self._sweeps.note_lost_queue(self._clock.now()):
                log.error("queue_lost_leases", then="the jobs of all ready deliveries are asked for, and added again")
        except SQLAlchemyError as error:  # the sweep notices an empty queue by itself
            log.warning("queue_loss_not_noted", error=type(error).__name__)


def _delivery_of(claim: Claim) -> str:
    try:
        return FederationDeliveryJob.model_validate_json(claim.payload).delivery_job_id
    except ValidationError:
        return row_of_job(claim.job_id)


_LEVELS: Final = {
    WorkerEventKind.READY: "info",
    WorkerEventKind.STOPPED: "info",
    WorkerEventKind.STALLED: "warning",
    WorkerEventKind.FAILING: "warning",
    WorkerEventKind.SNOOZED: "warning",
    WorkerEventKind.FAILED: "error",
    WorkerEventKind.CANCELLED: "info",
    WorkerEventKind.LEASE_LOST: "warning",
    WorkerEventKind.ERROR: "error",
    WorkerEventKind.SET_ASIDE: "error",
}


def _log_set_aside(event: WorkerEvent, fields: Mapping[str, object]) -> None:
    reason = None if event.error is None else _message(event.error)
    advice = "`federation queues repair` queues it again; who produced it?"
    log.error("job_set_aside", job_ids=event.job_ids, reason=reason, advice=advice, **fields)


def log_event(event: WorkerEvent) -> None:
    """Log one line for each event worth one.

    These are a worker's start, stop and errors, and every attempt that did not succeed.
    """
    level = _LEVELS.get(event.kind)
    # These would make a line for each of a hundred thousand deliveries to a server that is down.
    if level is None or isinstance(event.error, Held | Superseded):
        return
    fields: dict[str, object] = {"queue": event.queue, "worker_id": event.worker_id}
    if event.kind is WorkerEventKind.SET_ASIDE:
        _log_set_aside(event, fields)
        return
    if event.claim is not None:
        fields |= {
            "job_id": event.claim.job_id,
            "job_name": event.claim.name,
            "attempt": event.claim.attempt,
            "attempts_left": max(event.claim.max_attempts - event.claim.attempt, 0),
            **_destination(event.claim, event.error),
        }
    if event.job_ids:
        fields["job_ids"] = event.job_ids[:20]
    if event.delay is not None:
        fields["next_attempt_in"] = round(event.delay.total_seconds(), 3)
    if event.error is not None:
        fields |= {"error_type": type(event.error).__name__, "error": _message(event.error, queue=event.queue)}
    getattr(log, level)(f"worker_{event.kind.value}", **fields)


def _message(error: BaseException, *, queue: str | None = None) -> str | None:
    """Return the error's text if it is ours: others may quote what was sent. A task's text is its application's."""
    return str(error) if isinstance(error, WorkersError) or queue == TASKS_QUEUE_NAME else None


def _destination(claim: Claim, error: BaseException | None) -> dict[str, object]:
    """Return what the job delivers, and where; nothing for a job that is no delivery."""
    try:
        delivery = FederationDeliveryJob.model_validate_json(claim.payload)
    except ValidationError:
        return {}
    method = error.method if isinstance(error, PermanentFailure | RetryableFailure) else None
    return {"method": method, "target_url": delivery.target_url}
