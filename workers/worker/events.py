"""The events that a worker reports while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TypeAlias

from workers.errors import ForeignQueue
from workers.jobs import Claim, JobRecord

logger = logging.getLogger(__name__)


class WorkerEventKind(StrEnum):
    """The kinds of worker events.

    `continued`: an attempt succeeded, and the job goes on as the next link of its chain; `failing`: an attempt failed
    and will be repeated; `snoozed`: it was none, because the handler put its job off; `failed`: the job failed for
    good; `cancelled`: an attempt was stopped because somebody cancelled its job; `suspended`: an attempt ended,
    uncounted, because the job waits for its children; `drained`: the last claim left nothing, and all jobs claimed have
    ended; `error`: the storage failed a call, which says nothing about any job; `set_aside`: a job that another program
    wrote cannot be run, and waits for `Management.repair`; `stopping`: it claims no more, and waits for what runs;
    `stopped`: it has ended.
    """

    READY = "ready"
    ACTIVE = "active"
    COMPLETED = "completed"
    CONTINUED = "continued"
    FAILING = "failing"
    SNOOZED = "snoozed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    RELEASED = "released"
    SUSPENDED = "suspended"
    LEASE_LOST = "lease_lost"
    SET_ASIDE = "set_aside"
    ERROR = "error"
    DRAINED = "drained"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """One event of a worker or reaper.

    Events of an attempt carry its `claim`. Those of the reaper carry `job_ids` instead: `stalled` jobs are back in the
    queue; `failed` ones had stalled too often, or with their last attempt, and `records` has what is kept of them, with
    payload and error. `set_aside` carries the id of one job, and
    its `error` says why. `delay` is the time until the next attempt, `duration` how long the handler ran.
    """

    kind: WorkerEventKind
    queue: str
    worker_id: str
    claim: Claim | None = None
    error: BaseException | None = None
    delay: timedelta | None = None
    duration: timedelta | None = None
    job_ids: tuple[str, ...] = ()
    records: tuple[JobRecord, ...] = ()


Observer: TypeAlias = Callable[[WorkerEvent], None]
"""Called in the event loop for every event; must be quick. What it raises is logged and goes no further."""


class Emitter:
    """Tells `observers` what one worker does on one queue."""

    def __init__(self, observers: Sequence[Observer], *, queue: str, worker_id: str) -> None:
        self._observers = observers
        self._queue = queue
        self._worker_id = worker_id
        self._told_foreign = False

    def emit(
        self,
        kind: WorkerEventKind,
        *,
        claim: Claim | None = None,
        error: BaseException | None = None,
        delay: timedelta | None = None,
        duration: timedelta | None = None,
        job_ids: tuple[str, ...] = (),
        records: tuple[JobRecord, ...] = (),
    ) -> None:
        """Call every observer with the event."""
        if not self._observers:
            return
        event = WorkerEvent(
            kind=kind,
            queue=self._queue,
            worker_id=self._worker_id,
            claim=claim,
            error=error,
            delay=delay,
            duration=duration,
            job_ids=job_ids,
            records=records,
        )
        for observer in self._observers:
            try:
                observer(event)
            except Exception:  # an observer's bug must not end the worker
                logger.exception("observer %r failed on event %r", observer, kind.value)

    def report(self, error: BaseException) -> None:
        """Call every observer with the error; that the queue is another library's is told once."""
        if isinstance(error, ForeignQueue):
            if self._told_foreign:
                return
            self._told_foreign = True
        self.emit(WorkerEventKind.ERROR, error=error)
