"""One attempt: from a claim to the settlement that ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum

from workers.chains import Continuation
from workers.errors import (
    CorruptPayloadError,
    HandlerTimeout,
    JobCancelledError,
    LossReason,
    Retry,
    StalledError,
    UnrecoverableError,
)
from workers.handlers import AttemptContext, Handler, HandlerTable, Middleware, Signal, SignalReason, call, make_job
from workers.jobs import Claim, Completed, Continued, ErrorInfo, Failed, Released, Retried, Settlement
from workers.retry import RetryPolicy
from workers.serde import Serde


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended: what to settle (None: the lease is lost, nothing may be), and the error behind it."""

    settlement: Settlement | None
    error: BaseException | None = None
    duration: timedelta = timedelta(0)


class Phase(Enum):
    """Where an attempt is. It may be cancelled while its handler runs, never later: that would lose the settlement."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Attempt:
    """One run of a claimed job; `reporter` is told of its progress."""

    claim: Claim
    queue: str
    reporter: Callable[[Claim, bytes], None]
    signal: Signal = field(default_factory=Signal)
    phase: Phase = Phase.STARTING
    task: asyncio.Task[None] | None = None

    def interrupt(self, reason: SignalReason, loss: LossReason | None = None) -> bool:
        """The handler is told why and cancelled, or never starts. False: it had ended, nothing happened."""
        if self.phase is Phase.ENDED:
            return False
        self.signal.fire(reason, loss)
        if self.phase is Phase.RUNNING and self.task is not None:
            self.task.cancel()
        return True

    def report(self, progress: bytes) -> None:
        """The job has come this far; of no effect when the handler has ended, as a thread may not know."""
        if self.phase is not Phase.ENDED:
            self.reporter(self.claim, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs attempts for one worker: finds the handler, bounds it, and turns whatever happens into an `Ending`."""

    handlers: HandlerTable
    retry: RetryPolicy
    payload_serde: Serde
    result_serde: Serde
    middlewares: tuple[Middleware, ...]

    async def run(self, attempt: Attempt) -> Ending:
        """Run the handler once. Every exception of the handler, `BaseException` included, becomes a settlement.

        Raises:
            CancelledError: somebody else than the worker cancelled the attempt's task.
        """
        started, task = time.monotonic(), asyncio.current_task()
        policy = attempt.claim.backoff or self.retry
        try:
            handler = self._handler(attempt.claim)
            policy = attempt.claim.backoff or handler.retry or self.retry
            context = self._context(attempt)
            if attempt.signal.reason is not None:  # interrupted before it began
                raise asyncio.CancelledError
            attempt.phase = Phase.RUNNING
            result = await self._bounded(handler, context)
            attempt.phase = Phase.ENDED
            settlement: Settlement | None = self._success(attempt.claim, result)
            error = None
        except BaseException as caught:
            if isinstance(caught, GeneratorExit) and not _runs(task):
                raise  # the loop is being torn down: awaiting anything more is an error
            attempt.phase = Phase.ENDED
            _pass_on_foreign_cancellation(attempt, caught)
            settlement, error = _settlement_of(attempt, caught, policy), caught
        if attempt.signal.reason is SignalReason.LEASE_LOST:
            settlement = None
        return Ending(settlement=settlement, error=error, duration=timedelta(seconds=time.monotonic() - started))

    def _handler(self, claim: Claim) -> Handler:
        if claim.stalled is not None:
            raise StalledError(claim.stalled.message)
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

    async def _bounded(self, handler: Handler, context: AttemptContext) -> object:
        if handler.timeout is None:
            return await call(handler, context, self.middlewares)
        try:
            async with asyncio.timeout(handler.timeout.total_seconds()) as scope:
                return await call(handler, context, self.middlewares)
        except TimeoutError as error:
            if scope.expired():
                raise HandlerTimeout(f"the handler ran longer than {handler.timeout}") from error
            raise

    def _success(self, claim: Claim, result: object) -> Completed | Continued:
        if not isinstance(result, Continuation):
            return Completed(claim=claim, result=self._encode(result))
        try:
            return result.settlement(claim, self.payload_serde)
        except (TypeError, ValueError) as error:
            raise UnrecoverableError(f"job {claim.job_id!r} cannot be continued: {error}") from error

    def _encode(self, result: object) -> bytes:
        try:
            return self.result_serde.dumps(result)
        except (TypeError, ValueError) as error:
            raise UnrecoverableError(
                f"the handler's result of type {type(result).__name__} cannot be encoded by "
                f"{type(self.result_serde).__name__}: {type(error).__name__}"
            ) from error


def _runs(task: asyncio.Task[object] | None) -> bool:
    """Whether this is called from within the task, and not because what was left of it is thrown away."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs any more
        return False


def _pass_on_foreign_cancellation(attempt: Attempt, error: BaseException) -> None:
    """The worker's own cancellations come with a signal, and a handler may raise `CancelledError` of itself."""
    task = asyncio.current_task()
    assert task is not None
    if attempt.signal.reason is None and isinstance(error, asyncio.CancelledError) and task.cancelling():
        raise error


def _settlement_of(attempt: Attempt, error: BaseException, policy: RetryPolicy) -> Settlement:
    claim = attempt.claim
    if attempt.signal.reason is SignalReason.SHUTDOWN:
        return Released(claim=claim)
    if attempt.signal.reason is SignalReason.CANCELLED:
        return Failed(claim=claim, error=ErrorInfo.of(JobCancelledError(f"job {claim.job_id!r} was cancelled")))
    return settlement_of_failure(claim, error, policy)


def settlement_of_failure(
    claim: Claim, error: BaseException, policy: RetryPolicy, *, now: datetime | None = None
) -> Retried | Failed:
    """What a handler's exception means for its job: again after some time, or failed for good."""
    if isinstance(error, UnrecoverableError | StalledError):
        return Failed(claim=claim, error=ErrorInfo.of(error))
    if ends_the_job(error, claim.attempt, claim.max_attempts):
        return Failed(claim=claim, error=ErrorInfo.of(error, exhausted=True))
    return Retried(
        claim=claim,
        delay=_delay(claim, error, policy, now or datetime.now(UTC)),
        error=ErrorInfo.of(error),
        counted=_is_counted(error),
        postponed=isinstance(error, Retry) and error.postponed,
    )


def ends_the_job(error: BaseException, attempt: int, max_attempts: int) -> bool:
    """Whether the job fails for good when this attempt raises `error`."""
    if isinstance(error, UnrecoverableError | StalledError):
        return True
    return _is_counted(error) and attempt >= max_attempts


def _is_counted(error: BaseException) -> bool:
    return not isinstance(error, Retry) or error.counted


def _delay(claim: Claim, error: BaseException, policy: RetryPolicy, now: datetime) -> timedelta:
    if isinstance(error, Retry):
        if error.delay is not None:
            return max(error.delay, timedelta(0))
        if error.at is not None:
            return max(error.at - now, timedelta(0))
        if error.at_least is not None:
            return max(error.at_least, policy.delay(claim.attempt))
    return policy.delay(claim.attempt)
