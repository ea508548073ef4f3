"""Handlers, the jobs they get, what these ask of the worker that runs them, and the middlewares around them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from workers.checks import as_lease, as_positive, check_function
from workers.ends import EndedJob
from workers.errors import ErrorInfo, LossReason, UnknownJobError, Unsupported
from workers.flows import Children, EnqueuedFlow, FlowJob
from workers.follow_ups import FollowUp, follow_up_id
from workers.jobs import AfterFailure, Claim, JobRef
from workers.jobs.job import by_queue
from workers.retention import Retention, check_retention
from workers.retry import RetryPolicy, check_policy
from workers.storage.base import ANY_NAME
from workers.worker.events import encode_progress, log_line
from workers.worker.relatives import OwnChildren

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class Run(Protocol):
    """What a job knows of the attempt that runs it."""

    @property
    def queue(self) -> str: ...

    def abandonment(self) -> asyncio.Future[None] | None:
        """Return a future that is done when a plain function is not waited for any more.

        None: it is not waited for once the attempt is cancelled.
        """

    @property
    def is_abandoned(self) -> bool:
        """Whether the attempt ends unsettled, while its plain function may go on."""

    def report(self, progress: bytes) -> None:
        """Report how far the job has come; from any thread, without blocking."""

    def log(self, line: str) -> None:
        """Keep the line beside the job, if its storage keeps any; from any thread, without blocking."""

    def leave_slot(self) -> bool:
        """See `Job.leave_slot`."""

    def keep_result(self, keep: Retention) -> None:
        """See `Job.keep_result`."""

    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        """See `Job.transaction`."""

    def complete(self, result: object) -> None:
        """See `Job.complete`."""

    def children(self) -> OwnChildren:
        """Return what reads the job's children, adds some, and waits for them; `Unsupported` if it can have none."""

    async def results(self) -> Mapping[str | JobRef, EndedJob]:
        """See `Job.results`."""

    def then(self, follow_up: FollowUp) -> None:
        """See `Job.then`."""


class NoRun:
    """The run of a job that no worker runs, as in tests of a handler."""

    queue = ""
    is_abandoned = False

    def abandonment(self) -> None:
        """Do nothing: nobody waits."""

    def report(self, progress: bytes) -> None:
        """Do nothing: nobody listens."""

    def log(self, line: str) -> None:
        """Do nothing: there is no storage."""

    def leave_slot(self) -> bool:
        """Return False: there is no slot to leave."""
        return False

    def keep_result(self, keep: Retention) -> None:
        raise Unsupported("no worker of this package runs the job, which alone could keep its result")

    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        raise Unsupported("no worker of this package runs the job, which alone could commit its end")

    def complete(self, result: object) -> None:
        raise Unsupported("no worker of this package runs the job, which alone could commit its end")

    def children(self) -> OwnChildren:
        raise Unsupported("no worker of this package runs the job, which alone knows its children")

    async def results(self) -> Mapping[str | JobRef, EndedJob]:
        raise Unsupported("no worker of this package runs the job, which alone could read what others gave")

    def then(self, follow_up: FollowUp) -> None:
        raise Unsupported("no worker of this package runs the job, which alone could enqueue another with its end")


job_logger = logging.getLogger("workers.job")


class SignalReason(StrEnum):
    """Why a handler should end early."""

    LEASE_LOST = "lease_lost"
    CANCELLED = "cancelled"
    SHUTDOWN = "shutdown"


class Signal:
    """Fires at most once, with the reason; right afterwards the handler's task is cancelled."""

    __slots__ = ("_fired", "loss", "reason")

    def __init__(self) -> None:
        self.reason: SignalReason | None = None
        self.loss: LossReason | None = None
        self._fired: asyncio.Event | None = None

    def fire(self, reason: SignalReason, loss: LossReason | None = None) -> None:
        """Set the reason, unless one was set before; `loss` says how a lease was lost."""
        if self.reason is None:
            self.reason, self.loss = reason, loss
            if self._fired is not None:
                self._fired.set()

    async def wait(self) -> SignalReason:
        """Wait until the signal has fired, and return its reason."""
        if self.reason is None:
            # Made on demand: most handlers never wait, and an Event for every attempt would cost them all.
            self._fired = self._fired or asyncio.Event()
            await self._fired.wait()
        assert self.reason is not None
        return self.reason


_NO_RUN: Final = NoRun()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a handler gets: the job, its decoded payload, and the number of this attempt (the first is 1).

    `chain_index` is the number of this link of the job's chain; the first is 0. `last_error` is the error of the last
    attempt at this link that failed, counted or not; a worker that vanished leaves none. `meta` is what was enqueued
    with the job; see `JobSpec`.
    """

    id: str
    name: str
    payload: Any = field(repr=False)  # Any: what was enqueued; a task's arguments have types
    attempt: int
    max_attempts: int
    created_at: datetime
    chain_index: int = 0
    last_error: ErrorInfo | None = field(default=None, repr=False)
    meta: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    signal: Signal = field(default_factory=Signal)
    run: Run = field(default=_NO_RUN, repr=False, compare=False)

    def progress(self, value: object) -> None:
        """Show `value` as JSON in `JobStatus.progress`, within about 0.1 s, unless a later one replaces it.

        Returns at once and may be called from any thread, as often as you like. Best effort: a storage that cannot be
        reached costs a report, never the job. The progress stays until the next report, even one of a later attempt,
        and goes with the record.

        Raises:
            ValueError: it is no JSON value, or longer than 4 KiB as one.
        """
        self.run.report(encode_progress(value))

    def log(self, line: str) -> None:
        """Log the line by the logger `workers.job` at level info.

        `job_id`, `job_name`, `attempt` and `queue` are attributes of its record. Control characters are escaped, and
        what exceeds 8 KiB is cut. On BullMQ the queue keeps the line as well, as Node's `job.log` does: the last
        `keepLogs` lines of a job, 1 000 at most. It does so within about 0.1 s, and best effort. No other queue keeps
        it, because it would grow by it.
        """
        extra = {"job_id": log_line(self.id), "job_name": log_line(self.name), "attempt": self.attempt}
        line = log_line(line)
        job_logger.info("%s", line, extra={**extra, "queue": self.run.queue})
        self.run.log(line)

    def leave_slot(self) -> bool:
        """Go on in overtime, so that another job may take this attempt's place in the worker's `concurrency`.

        Nothing else changes. The lease is renewed, the timeout still counts, the job keeps its ordering key, is told of
        a cancel and of a stop, is waited for during the grace, and is settled like any other. Returns at once and may
        be called from any thread, as often as you like.

        Returns True if the attempt is out of its slot, by this call or an earlier one. Returns False if it stays there:
        because as many as the worker's `overtime` allows are out already, because no worker of this package runs it, or
        because it has ended.
        """
        return self.run.leave_slot()

    def keep_result(self, keep: Retention) -> None:
        """Keep the result for so long if this attempt completes the job, whatever its `result_ttl`; `DROP`: not at all.

        The last call counts.

        Raises:
            ValueError, TypeError: neither `DROP` nor a duration up to 100 years above zero.
            Unsupported: no worker of this package runs the job.
        """
        check_retention(keep)
        self.run.keep_result(keep)

    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a transaction that commits what its block writes together with the end of the job.

        Use it as `async with job.transaction() as session:`; the session is on the queue's own database. At the end of
        the block the job ends as `complete` said, or completes with None; what the handler returns or raises afterwards
        has no effect. A block that raises has written nothing, and its exception is a failure like any other. Pass
        `connection=session` to enqueue other jobs in it.

        On SQLite the block holds the only write lock: keep it short. `progress` is refused in it.

        Raises:
            Unsupported: the storage has no `capabilities.transactions`.
            LeaseLost: at the end of the block: another worker has the job by now, so nothing was written.
            TransactionError: at the end of the block: it was committed or rolled back inside.
            StorageUnavailable: the database did not answer, or another transaction held its lock too long.
        """
        return self.run.transaction()

    def complete(self, result: object = None) -> None:
        """End the job with `result`, which may be `continue_with(...)`, as if the handler had returned it.

        Only to be called in the block of `transaction`, once.

        Raises:
            UnrecoverableError: `result` cannot be encoded, or the job cannot be continued so.
            RuntimeError: outside of such a block, or for the second time in it.
        """
        self.run.complete(result)

    async def children(self, *, limit: int = 1_000, cursor: str | None = None) -> Children:
        """Return the results and failures of the job's children in a flow, and how many are unfinished.

        About `limit` of those that have ended, or fewer if 16 MiB were read; pass its `cursor` for more. Children that
        end meanwhile may be missed, or come twice. Only in handlers that are `async`.

        Raises:
            Unsupported: the storage has no `capabilities.flows`.
            ValueError: a result cannot be decoded by the worker's serde.
        """
        return await self.run.children().read(limit, cursor)

    async def add_children(self, children: Sequence[FlowJob]) -> list[EnqueuedFlow]:
        """Enqueue further children of the running job, with those below them: up to 1 000 jobs, all of them or none.

        Each needs an id, and an `on_failure` other than `REMOVE`. One that the job has among its children already, from
        an earlier run, is not added again. A field that is None takes the default of `NewJob`. See `wait_for_children`,
        and `Queue.enqueue_flow` for what else it raises.

        Raises:
            Unsupported: the storage has no `capabilities.flows`.
            ValueError: a child without an id, or without `on_failure`.
            LeaseLost: another worker has the job by now, so nothing was added.
        """
        return await self.run.children().add(children)

    async def wait_for_children(self) -> None:
        """Return if no child is unfinished; else end this run, and the job runs again, from the start, when they have.

        Such a run is not counted as an attempt. Call it before every use of the results: an operator's retry, say, runs
        the job while some children are unfinished.

        Raises:
            WaitForChildren: to be passed on to the worker.
            Unsupported: the storage has no `capabilities.flows`.
        """
        await self.run.children().wait()

    async def results(self) -> Mapping[str | JobRef, EndedJob]:
        """Return how the jobs ended that this one came `after`: by id, or by `JobRef` if they are of another queue.

        `(await job.results())["part-1"].result` is what that one gave. They are kept until this job ends at least,
        whatever becomes of the records of the others, and each attempt reads the same. All are there, unless an
        operator let the job run without waiting for the rest. The later links of a chain read those of the last link
        that came after others. A result above 64 KiB is not kept so: it is there as long as the record of its job is,
        if that is of this queue. Nothing is read before this is called. Only in handlers that are `async`.

        Raises:
            Unsupported: no worker of this package runs the job.
        """
        return await self.run.results()

    def then(
        self,
        name: str,
        payload: object,
        *,
        id: str | None = None,  # noqa: A002 - as in `Queue.enqueue`
        delay: timedelta = timedelta(0),
        max_attempts: int | None = None,
        priority: int | None = None,
        ordering_key: str | None = None,
        backoff: RetryPolicy | None = None,
        after: Iterable[str | JobRef] = (),
        after_failure: AfterFailure | Literal["fail", "run"] = AfterFailure.FAIL,
    ) -> str:
        """Enqueue another job in the very step in which this one completes, and return its id.

        Nothing is enqueued if this attempt ends in any other way. `id` is by default one that stays the same in each
        attempt; a job that has it already is left as it is. `max_attempts`, `priority`, `backoff` and retention default
        to those of this job; an `ordering_key` is not passed on. See `capabilities.atomic_continuation`. Once per
        attempt. It may follow others as well, as by `Queue.enqueue(after=...)`; one that nobody knows counts as gone.

        Raises:
            RuntimeError: it was called before, or the attempt has ended.
            Unsupported: no worker of this package runs the job.
        """
        own, elsewhere = by_queue(after, self.run.queue)
        job_id = follow_up_id(self.id, self.created_at, self.chain_index) if id is None else id
        self.run.then(
            FollowUp(
                id=job_id,
                name=name,
                payload=payload,
                delay=delay,
                max_attempts=max_attempts,
                priority=priority,
                ordering_key=ordering_key,
                backoff=backoff,
                after=own,
                after_elsewhere=elsewhere,
                after_failure=AfterFailure(after_failure),
            )
        )
        return job_id


HandlerFunction: TypeAlias = Callable[[Job], object]
"""`async def (job) -> result`; a plain function runs in a thread of its own, and its attempt lasts until it returns."""

Next: TypeAlias = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """What the middlewares of one attempt share; they may put anything into `data`."""

    job: Job
    queue: str
    worker_id: str
    data: dict[str, object] = field(default_factory=dict)


Middleware: TypeAlias = Callable[[AttemptContext, Next], Awaitable[object]]
"""Wraps an attempt: it may observe, measure, change the result, or not call `next` at all."""


@dataclass(frozen=True, slots=True)
class Handler:
    """A function with settings of its own; a setting that is None is the worker's.

    `timeout` bounds one run: the function is cancelled when it is over, and the attempt fails with `HandlerTimeout`.
    Nobody can interrupt a plain function, so its attempt fails when the function returns. A job with a shorter timeout
    of its own, as Node may set on Bull, uses that. Numbers are seconds.
    """

    fn: HandlerFunction
    retry: RetryPolicy | None = None
    lease: timedelta | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        check_function("a handler", self.fn)
        check_policy("a handler's retry", self.retry)
        if self.lease is not None:
            object.__setattr__(self, "lease", as_lease("a handler's lease", self.lease))
        if self.timeout is not None:
            object.__setattr__(self, "timeout", as_positive("a handler's timeout", self.timeout))


class HandlerTable:
    """The handlers by job name; `"*"` takes every name that is not listed."""

    def __init__(self, handlers: Mapping[str, HandlerFunction | Handler]) -> None:
        if not handlers:
            raise ValueError("a worker needs at least one handler")
        self._handlers = {
            name: entry if isinstance(entry, Handler) else Handler(entry) for name, entry in handlers.items()
        }

    def find(self, name: str) -> Handler:
        """Return the handler for `name`.

        Raises:
            UnknownJobError: none is registered, and there is no catch-all.
        """
        handler = self._handlers.get(name) or self._handlers.get(ANY_NAME)
        if handler is None:
            raise UnknownJobError(f"no handler for jobs named {name!r}; this worker knows {sorted(self._handlers)}")
        return handler

    def leases(self, default: timedelta, *, every_name: bool) -> dict[str, timedelta]:
        """Return the leases to claim with.

        `every_name` adds a catch-all where the storage cannot filter by name.
        """
        leases = {name: handler.lease or default for name, handler in self._handlers.items()}
        if every_name:
            leases.setdefault(ANY_NAME, default)
        return leases


def make_job(claim: Claim, payload: object, signal: Signal, run: Run = _NO_RUN) -> Job:
    """Return a claim as its handler sees it."""
    return Job(
        signal=signal,
        run=run,
        id=claim.job_id,
        name=claim.name,
        payload=payload,
        attempt=claim.attempt,
        max_attempts=claim.max_attempts,
        created_at=claim.created_at,
        chain_index=claim.chain_index,
        last_error=claim.last_error,
        meta=claim.meta,
    )
