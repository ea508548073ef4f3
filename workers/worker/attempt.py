"""One attempt: from a claim, by a call of the handler inside its middlewares, to the settlement that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from workers.chains import Continuation
from workers.clock import monotonic
from workers.ends import EndedJob
from workers.errors import (
    ChildFailedError,
    CorruptPayloadError,
    HandlerTimeout,
    LossReason,
    Snooze,
    StalledError,
    TransactionError,
    UnrecoverableError,
    Unsupported,
    WaitForChildren,
    WorkersError,
)
from workers.follow_ups import FollowUp
from workers.jobs import (
    Cancelled,
    Claim,
    Completed,
    Continued,
    Failed,
    JobRef,
    NewJob,
    Released,
    Retention,
    Retried,
    Settlement,
    Suspended,
)
from workers.retry import RetryPolicy
from workers.serde import Serde
from workers.worker.failures import NamedBackoffs, decision_in, ends_the_job, policy_after, settlement_of_failure
from workers.worker.handlers import (
    AttemptContext,
    Handler,
    HandlerFunction,
    HandlerTable,
    Job,
    Middleware,
    Next,
    Signal,
    SignalReason,
    make_job,
)
from workers.worker.relatives import OwnChildren, Predecessors
from workers.worker.transactions import OwnTransaction

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession  # an extra: only storages that have it make sessions

logger = logging.getLogger(__name__)


async def call(handler: Handler, context: AttemptContext, middlewares: Sequence[Middleware]) -> object:
    """Run the handler inside its middlewares, the first of them outermost."""
    step: Next = partial(invoke, handler.fn, context.job)
    for middleware in reversed(middlewares):
        step = partial(middleware, context, step)
    return await step()


async def invoke(function: HandlerFunction, job: Job) -> object:
    """Return what the function returns; a plain one runs in a thread of its own."""
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            result = function(job)
        else:
            result = await _in_thread(function, job)
        return await result if inspect.isawaitable(result) else result
    except BaseExceptionGroup as group:
        decision = decision_in(group)
        if decision is group:
            raise
        raise decision from group


NO_THREAD_FOR: Final = timedelta(seconds=1)
"""How long a plain function waits if it gets no thread."""


async def _in_thread(function: HandlerFunction, job: Job) -> object:
    """Run the function in a daemon thread, so that one that never returns cannot keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: object, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function, job)
        except BaseException as caught:
            error = RuntimeError(repr(caught)) if isinstance(caught, StopIteration | GeneratorExit) else caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    thread = threading.Thread(target=run, name=f"handler-{job.name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the machine allows no more, or the interpreter ends: the job was not tried
        logger.warning("job %r (%s) waits for a thread: %s", job.id, job.name, error)
        raise Snooze(NO_THREAD_FOR, reason=f"no thread could be started: {error}") from error
    return await _end_of(future, job)


async def _end_of(future: asyncio.Future[object], job: Job) -> object:
    """Return the result of a plain function.

    It goes on when it is cancelled, and so does its attempt, which keeps slot and lease.
    """
    abandonment = job.run.abandonment()
    awaited: list[asyncio.Future[object] | asyncio.Future[None]] = [future]
    if abandonment is not None:
        awaited.append(abandonment)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
        if not future.done() and (cancelled if abandonment is None else abandonment.done()):
            future.cancel()
            raise cancelled or asyncio.CancelledError
    # A result that is there by the time of a stop counts; one that is too late or was cancelled does not.
    if cancelled is not None and job.signal.reason is not SignalReason.SHUTDOWN:
        if not future.cancelled():
            future.exception()  # retrieved, or asyncio would complain
        raise cancelled
    return future.result()


_GIVEN_UP: Final[dict[str, type[WorkersError]]] = {
    kind.__name__: kind for kind in (ChildFailedError, UnrecoverableError)
}
"""Why a claimed job must not run, if not because it stalled."""

OUT_OF_TIME: Final = "operation timed out"
"""The message of a run that took longer than its job allows: the words of Bull, for programs that look for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended: its settlement (None: the lease is lost, so nothing may be settled), and its error.

    `settled`: the handler has committed the settlement itself.
    """

    settlement: Settlement | None
    error: BaseException | None = None
    duration: timedelta = timedelta(0)
    settled: bool = False


class Phase(Enum):
    """The phase of an attempt.

    It may be cancelled while its handler runs, never later: that would lose the settlement.
    """

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


def _refuse(claim: Claim) -> OwnTransaction:
    raise Unsupported(f"job {claim.job_id!r} is run by no worker, which alone could commit its end")


def _keep_none(claim: Claim, line: str) -> None:
    """Do nothing: nobody keeps what the job logs."""


def _stay(token: str) -> bool:
    """Return False: there is no slot to leave."""
    return False


@dataclass(slots=True, eq=False)
class Attempt:
    """One run of a claimed job.

    `reporter` is called with its progress, and `make_own` when its handler wants a transaction of its own. `leave` is
    called with the claim's token when its handler wants to leave its slot, and `keep_line` with what its handler logs.
    `make_children` gives access to the job's children; None on a storage without flows. `predecessors` reads how those
    ended that it came after; None where no job comes after others.
    """

    claim: Claim
    queue: str
    reporter: Callable[[Claim, bytes], None]
    make_own: Callable[[Claim], OwnTransaction] = _refuse
    signal: Signal = field(default_factory=Signal)
    phase: Phase = Phase.STARTING
    task: asyncio.Task[None] | None = None
    own: OwnTransaction | None = None
    leave: Callable[[str], bool] = field(default=_stay, kw_only=True)
    keep_line: Callable[[Claim, str], None] = field(default=_keep_none, kw_only=True)
    given_up: asyncio.Future[None] | None = None
    make_children: Callable[[Claim], OwnChildren] | None = field(default=None, kw_only=True)
    predecessors: Predecessors | None = field(default=None, kw_only=True)
    follow_up: FollowUp | None = None
    keep: Retention | None = None

    def abandonment(self) -> asyncio.Future[None]:
        """See `Run.abandonment`."""
        self.given_up = self.given_up or asyncio.get_running_loop().create_future()
        return self.given_up

    def abandon(self) -> bool:
        """Stop waiting for a plain function, because the worker stops; the job is left until its lease ends.

        Returns False when there is none.
        """
        if self.given_up is None or self.phase is Phase.ENDED:
            return False
        if not self.given_up.done():
            self.given_up.set_result(None)
        return True

    @property
    def is_abandoned(self) -> bool:
        """See `Run.is_abandoned`."""
        return self.given_up is not None and self.given_up.done()

    @property
    def settled(self) -> Completed | Continued | None:
        """What the handler has committed in a transaction of its own."""
        return None if self.own is None else self.own.settled

    def interrupt(self, reason: SignalReason, loss: LossReason | None = None) -> bool:
        """Tell the handler the reason and cancel it, or never start it. Returns False if it had ended.

        A handler whose own transaction has ended the job has nothing left to lose; it is told of a shutdown only.
        """
        ended = self.own is not None and self.own.beyond_recall and reason is not SignalReason.SHUTDOWN
        if ended or self.phase is Phase.ENDED:
            return False
        self.signal.fire(reason, loss)
        if self.phase is Phase.RUNNING and self.task is not None:
            self.task.cancel()
        return True

    def report(self, progress: bytes) -> None:
        """Report how far the job has come.

        It has no effect once the handler has ended, which a thread may not know.

        Raises:
            TransactionError: within a transaction of the handler's own.
        """
        if self.own is not None and self.own.open:
            raise TransactionError(
                f"job {self.claim.job_id!r}: progress could only be told when its transaction has ended;"
                " report it before"
            )
        if self.phase is not Phase.ENDED:
            self.reporter(self.claim, progress)

    def log(self, line: str) -> None:
        """Keep a line of the job's log; it has no effect once the handler has ended."""
        if self.phase is not Phase.ENDED:
            self.keep_line(self.claim, line)

    def leave_slot(self) -> bool:
        """See `Job.leave_slot`."""
        return self.phase is not Phase.ENDED and self.leave(self.claim.token)

    def keep_result(self, keep: Retention) -> None:
        """See `Job.keep_result`."""
        self.keep = keep

    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        """See `Job.transaction`."""
        self.own = self.own or self.make_own(self.claim)
        return self.own.begin()

    def complete(self, result: object) -> None:
        """See `Job.complete`."""
        self.own = self.own or self.make_own(self.claim)
        self.own.complete(result)

    def children(self) -> OwnChildren:
        """See `Run.children`."""
        if self.make_children is None:
            raise Unsupported(f"queue {self.queue!r} is on a storage without `capabilities.flows`: no job has children")
        return self.make_children(self.claim)

    async def results(self) -> Mapping[str | JobRef, EndedJob]:
        """See `Job.results`."""
        return {} if self.predecessors is None else await self.predecessors.read(self.claim)

    def then(self, follow_up: FollowUp) -> None:
        """See `Job.then`."""
        if self.make_own is _refuse:  # whoever takes the settlement is no storage, and would lose the job
            _refuse(self.claim)
        if self.phase is Phase.ENDED or self.settled is not None:
            raise RuntimeError(f"job {self.claim.job_id!r}: then() comes before the end")
        if self.follow_up is not None:
            raise RuntimeError(f"job {self.claim.job_id!r}: then() was called before; one job follows at most")
        self.follow_up = follow_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs attempts for one worker: finds the handler, limits its time, and turns whatever happens into an `Ending`."""

    handlers: HandlerTable
    retry: RetryPolicy
    payload_serde: Serde
    result_serde: Serde
    middlewares: tuple[Middleware, ...]
    named_backoffs: NamedBackoffs = field(default_factory=lambda: NamedBackoffs({}))

    async def run(self, attempt: Attempt) -> Ending:
        """Run the handler once.

        Every exception of the handler, `BaseException` included, becomes a settlement.

        Raises:
            CancelledError: somebody other than the worker cancelled the attempt's task.
        """
        started, task = monotonic(), asyncio.current_task()
        fallback = self.retry
        try:
            handler = self._handler(attempt.claim)
            fallback = handler.retry or self.retry
            context = self._context(attempt)
            if attempt.signal.reason is not None:  # interrupted before it began
                raise asyncio.CancelledError
            attempt.phase = Phase.RUNNING
            result = await self._bounded(handler, context, attempt.claim.timeout)
            attempt.phase = Phase.ENDED
            settlement: Settlement | None = attempt.settled or self.success(attempt, result)
            error: BaseException | None = None
        except BaseException as caught:
            if isinstance(caught, GeneratorExit) and not _runs(task):
                raise  # the loop is being torn down: awaiting anything more is an error
            attempt.phase = Phase.ENDED
            _pass_on_foreign_cancellation(attempt, caught)
            error = decision_in(caught)  # a middleware may have a group of its own
            settlement = _settlement_of(attempt, error, self._policy(attempt.claim, error, fallback))
        if attempt.signal.reason is SignalReason.LEASE_LOST or attempt.is_abandoned:
            settlement = None
        duration = timedelta(seconds=monotonic() - started)
        if isinstance(settlement, Retried | Failed):
            settlement = replace(settlement, duration=duration)
        return Ending(
            settlement=attempt.settled or settlement,
            error=error,
            duration=duration,
            settled=attempt.settled is not None,
        )

    def _policy(self, claim: Claim, error: BaseException, fallback: RetryPolicy) -> RetryPolicy:
        """Return the job's own policy, or else `fallback`."""
        policy = claim.backoff
        if claim.named_backoff is not None and not ends_the_job(error, claim.attempt, claim.max_attempts):
            policy = self.named_backoffs.policy(claim.named_backoff, claim.attempt)
        return policy_after(error, policy, fallback)

    def _handler(self, claim: Claim) -> Handler:
        if claim.stalled is not None:
            raise _GIVEN_UP.get(claim.stalled.type, StalledError)(claim.stalled.message)
        return self.handlers.find(claim.name)

    def _context(self, attempt: Attempt) -> AttemptContext:
        claim = attempt.claim
        try:
            payload = self.payload_serde.loads(claim.payload)
        except ValueError as error:
            raise CorruptPayloadError(
                f"job {claim.job_id!r}: its payload of {len(claim.payload)} bytes cannot be decoded "
                f"by {type(self.payload_serde).__name__}: {type(error).__name__}"
            ) from None
        job = make_job(claim, payload, attempt.signal, attempt)
        return AttemptContext(job=job, queue=attempt.queue, worker_id=claim.worker_id)

    async def _bounded(self, handler: Handler, context: AttemptContext, jobs_own: timedelta | None) -> object:
        limit = _lesser(handler.timeout, jobs_own)
        if limit is None:
            return await call(handler, context, self.middlewares)
        late = asyncio.get_running_loop().call_later(2 * limit.total_seconds(), _warn_of_late, context.job, limit)
        try:
            async with asyncio.timeout(limit.total_seconds()) as scope:
                return await call(handler, context, self.middlewares)
        except TimeoutError as error:
            if scope.expired():
                why = OUT_OF_TIME if limit == jobs_own else f"the handler ran longer than {limit}"
                raise HandlerTimeout(why) from error
            raise
        finally:
            late.cancel()

    def success(self, attempt: Attempt, result: object) -> Completed | Continued:
        """Return the settlement that a handler's result means.

        Raises:
            UnrecoverableError: it cannot be encoded, or what is to follow it.
        """
        claim = attempt.claim
        if not isinstance(result, Continuation):
            encoded = self._encode(result)
            return Completed(claim=claim, result=encoded, keep=attempt.keep, then=self._then(attempt))
        if attempt.follow_up is not None:
            raise UnrecoverableError(f"job {claim.job_id!r} goes on as a chain: only its last link can use then()")
        try:
            return result.settlement(claim, self.payload_serde, attempt.queue)
        except (TypeError, ValueError) as error:
            raise UnrecoverableError(f"job {claim.job_id!r} cannot be continued: {error}") from error

    def _then(self, attempt: Attempt) -> NewJob | None:
        if attempt.follow_up is None:
            return None
        try:
            return attempt.follow_up.new_job(attempt.claim, self.payload_serde)
        except (TypeError, ValueError) as error:
            raise UnrecoverableError(f"no job can follow job {attempt.claim.job_id!r} so: {error}") from error

    def _encode(self, result: object) -> bytes:
        try:
            return self.result_serde.dumps(result)
        except (TypeError, ValueError) as error:
            raise UnrecoverableError(
                f"the handler's result of type {type(result).__name__} cannot be encoded by "
                f"{type(self.result_serde).__name__}: {type(error).__name__}"
            ) from error


def _warn_of_late(job: Job, limit: timedelta) -> None:
    logger.warning(
        "job %r (%s) still runs after twice its timeout of %s: it keeps its slot and its lease until its function ends",
        job.id,
        job.name,
        limit,
    )


def _lesser(one: timedelta | None, other: timedelta | None) -> timedelta | None:
    return one or other if one is None or other is None else min(one, other)


def _runs(task: asyncio.Task[object] | None) -> bool:
    """Tell whether the caller runs within the task, and not while the rest of it is being thrown away."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs any more
        return False


def _pass_on_foreign_cancellation(attempt: Attempt, error: BaseException) -> None:
    """Raise a cancellation that is not the worker's own.

    Those come with a signal, and a handler may raise `CancelledError` by itself.
    """
    task = asyncio.current_task()
    assert task is not None
    if attempt.signal.reason is None and isinstance(error, asyncio.CancelledError) and task.cancelling():
        raise error


def _settlement_of(attempt: Attempt, error: BaseException, policy: RetryPolicy) -> Settlement:
    claim = attempt.claim
    if attempt.signal.reason is SignalReason.SHUTDOWN:
        return Released(claim=claim)
    if attempt.signal.reason is SignalReason.CANCELLED:
        return Cancelled(claim=claim)
    if isinstance(error, WaitForChildren) and attempt.make_children is not None:
        return Suspended(claim=claim)
    return settlement_of_failure(claim, error, policy)
