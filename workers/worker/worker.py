"""The worker: it claims jobs, runs their handlers, settles them, keeps their leases, and stops without losing any.

Theory of operation. One loop claims: it fills all free slots with one call and starts an attempt per claim. It waits
for a slot while it is full, and for the storage's hint while there is nothing to do. The reaper runs beside it. The
settler, the lease keeper and the listener for cancel requests run around both, for as long as any attempt lives. An
attempt is in `_attempts` from its claim until its settlement is answered, so its lease is renewed all that time. Only
the claim loop adds attempts; only an attempt removes itself. An attempt that leaves its slot early, for overtime, is
like any other, except that it does not keep the claim loop waiting.

Stopping has three phases: claim no more; wait `grace` for running handlers; cancel the rest and release their jobs,
uncounted. Attempts that have not ended 5 s later are abandoned and their ids logged: their leases will run out and
another worker will take over. A worker that leaves no job behind is taken off the storage's list of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from workers.checks import as_duration, as_lease, as_positive
from workers.clock import monotonic
from workers.crons import Cron
from workers.details import JobReader
from workers.errors import LossReason, StorageError, StorageUnavailable, UnrecoverableError
from workers.jobs import (
    HEARD_EVERY,
    Cancelled,
    Claim,
    Completed,
    Continued,
    ErrorInfo,
    Failed,
    Released,
    Retried,
    SettleOutcome,
    SettleStatus,
    Suspended,
    new_worker_id,
)
from workers.retry import Backoff, RetryPolicy
from workers.storage.base import ANY_NAME, FlowStorage, Storage
from workers.worker.attempt import Attempt, Ending, Runner
from workers.worker.cancels import CancelListener
from workers.worker.events import Emitter, Observer, ProgressReporter, WorkerEventKind
from workers.worker.exchanges import Appetite, Exchanges, Settler, Slots, check_slots
from workers.worker.failures import FailedJobs, NamedBackoffs, OnFailed
from workers.worker.handlers import Handler, HandlerFunction, HandlerTable, SignalReason
from workers.worker.leases import LeaseKeeper
from workers.worker.maintenance import Reaper, SetAsideReporter, Ticker
from workers.worker.options import NotReady, WorkerOptions
from workers.worker.relatives import OwnChildren, Predecessors
from workers.worker.shutdown import Stop, all_done, cancel_all, first_failure, take_leave
from workers.worker.startup_checks import UnservedNames, connect_if_fit
from workers.worker.transactions import OwnTransaction

logger = logging.getLogger(__name__)

LONGEST_LINGER_SECONDS: Final = 0.02
FORCED_STOP_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0
BROKEN_CHECK_SECONDS: Final = 1.0
"""How long nothing is claimed after a `not_ready` that raised."""


class Worker:
    """Runs `handlers` on one queue, `concurrency` jobs at a time.

    `handlers` maps a job name to a function or `Handler`; `"*"` catches all other names. While the ends of some jobs
    are being stored, the next ones run in their slots, unless there is only one. Leases (default 30 s) are renewed
    after a third of their time; the reaper runs every half of the default lease, and more often where
    `capabilities.recovery_interval` says so. `observers` hear what it does. What else can be set is in `options`.

    Raises:
        ValueError, TypeError: a setting out of its range, or of another kind, by its name.
    """

    def __init__(
        self,
        storage: Storage,
        handlers: Mapping[str, HandlerFunction | Handler],
        *,
        concurrency: int = 10,
        lease: timedelta | float = timedelta(seconds=30),
        observers: Iterable[Observer] = (),
        options: WorkerOptions = WorkerOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        check_slots(concurrency, options.overtime)
        lease, self._poll_interval = as_lease("lease", lease), as_positive("poll_interval", options.poll_interval)
        self._grace = as_duration("grace", options.grace)
        self.worker_id = new_worker_id() if options.worker_id is None else options.worker_id
        self._storage = storage
        self._concurrency = concurrency
        self._not_ready: NotReady = options.not_ready or (lambda: None)
        self._stop = Stop()
        self._events = Emitter(tuple(observers), queue=storage.queue, worker_id=self.worker_id)
        self._runner = Runner(
            handlers=HandlerTable(handlers),
            retry=options.retry or RetryPolicy(),
            payload_serde=options.payload_serde,
            result_serde=options.result_serde,
            middlewares=tuple(options.middlewares),
            named_backoffs=NamedBackoffs(options.backoffs),
        )
        self._wanted = self._runner.handlers.leases(lease, every_name=not storage.capabilities.name_filter)
        self._context = contextvars.copy_context()  # of `run`; what attempts begin with
        self._slots = Slots(concurrency, options.overtime)
        self._attempts: dict[str, Attempt] = {}  # by token
        self._linger = 0.0  # how long the last claim took
        self._found_all = False  # whether the last claim took all due jobs, and none was given back since
        self._gave_up = False  # whether jobs stay claimed after the end
        self._idle = True  # whether the queue was reported as drained, and nothing was claimed since
        self._attend_attempts(options.on_failed)
        self._attend_queue(lease, options.max_stalls, options.on_failed, tuple(options.crons))

    def _attend_attempts(self, on_failed: OnFailed | None) -> None:
        """Make what the attempts need as long as any of them lives."""
        storage, serdes = self._storage, (self._runner.payload_serde, self._runner.result_serde)
        self._progress = ProgressReporter(storage, report=self._events.report)
        self._failed = None if on_failed is None else FailedJobs(JobReader(storage, *serdes), on_failed)
        self._own_children = partial(OwnChildren, storage, serdes) if isinstance(storage, FlowStorage) else None
        self._predecessors = Predecessors(storage, self._runner.result_serde)
        self._leases = LeaseKeeper(
            storage,
            interval=min(*self._wanted.values(), 3 * HEARD_EVERY) / 3,
            on_lost=self._lose,
            on_cancel=self._cancel,
            report=self._events.report,
        )
        self._cancels = CancelListener(storage, look=self._leases.renew_jobs, report=self._events.report)
        self._appetite = Appetite()
        self._exchanges = Exchanges(
            *(storage, self, self._slots, self._cancels),
            worker_id=self.worker_id,
            leases=self._wanted,
            appetite=self._appetite,
        )
        self._settler = Settler(
            self._exchanges.settle, limit=self._exchanges.limit, holds=self._leases.holds, report=self._events.report
        )

    def _attend_queue(
        self, lease: timedelta, max_stalls: int, on_failed: OnFailed | None, crons: Sequence[Cron]
    ) -> None:
        """Make what looks after the queue beside the attempts, until the worker stops."""
        for cron in crons:
            cron.check_as_ours()
        self._news = SetAsideReporter(self._storage, self._events)
        self._reaper = Reaper(
            self._storage,
            interval=lease / 2,
            max_stalls=max_stalls,
            name=self.worker_id,
            on_failed=on_failed,
            payload_serde=self._runner.payload_serde,
            events=self._events,
            renew=self._leases.renew_all,
        )
        served = self._wanted if self._storage.capabilities.name_filter else [ANY_NAME]
        self._unserved = UnservedNames(self._storage, served, interval=lease / 2, is_idle=lambda: self._idle)
        self._ticker = Ticker(self._storage, crons, report=self._events.report)

    @property
    def running(self) -> int:
        """How many jobs are claimed and not yet settled, those in overtime among them."""
        return len(self._attempts)

    def stop(self) -> None:
        """Ask the worker to stop: claim no more and let handlers finish for *grace*. A second call skips the grace."""
        self._stop.ask()
        self._slots.freed.set()

    async def run(self) -> None:
        """Work until `stop`, then let jobs finish for *grace* and give back the rest, uncounted.

        A storage that cannot be reached, or that answers with errors once the worker has begun, is reported and tried
        again for as long as it takes. Cancelling this call stops the worker without grace. A worker runs once.

        Raises:
            StorageError: the storage is not fit for use from the start, as with missing tables. `ServerUnfit`: its
                server may lose acknowledged jobs.
        """
        self._context = contextvars.copy_context()
        self._stop.listen()
        try:
            if await self._connect():
                await self._work()
        except ExceptionGroup as group:
            failure = first_failure(group)
            raise failure from failure.__cause__
        finally:
            self._stop.close()
            self._events.emit(WorkerEventKind.STOPPED)

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as side:
                tasks = [
                    side.create_task(self._settler.run(), name="settle"),
                    side.create_task(self._leases.run(), name="renew-leases"),
                    side.create_task(self._cancels.run(), name="hear-cancels"),
                    side.create_task(self._progress.run(), name="report-progress"),
                    side.create_task(self._unserved.run(), name="look-for-unserved"),
                ]
                try:
                    async with asyncio.TaskGroup() as intake:
                        reaping = intake.create_task(self._reaper.run(), name="reap")
                        ticking = intake.create_task(self._ticker.run(), name="tick")
                        try:
                            self._events.emit(WorkerEventKind.READY)
                            await self._claim_until_stopped()
                        finally:
                            await cancel_all([reaping, ticking])
                except asyncio.CancelledError:
                    self._stop.hurry()
                    raise
                finally:
                    self._events.emit(WorkerEventKind.STOPPING)
                    await self._finish()
                    await cancel_all(tasks)
        finally:
            try:
                if not self._gave_up:
                    await take_leave(self._storage, self.worker_id)
            finally:
                with contextlib.suppress(StorageUnavailable):
                    await self._storage.disconnect()

    async def _connect(self) -> bool:
        backoff = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        while not self._stop.asked:
            try:
                if await self._stop.unless(connect_if_fit(self._storage)):
                    return True
            except StorageUnavailable as error:
                self._events.report(error)
                await self._stop.unless(asyncio.sleep(backoff.pause()))
        return False

    async def _claim_until_stopped(self) -> None:
        backoff = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        while not self._stop.asked:
            await self._wait_for_slots()
            free = self._slots.free
            if free == 0 or self._is_served:
                continue
            if (wait := self._unready()) is not None:
                await self._stop.unless(self._until_ready(wait))
                continue
            try:
                asked = self._appetite.of(free)
                claims = await self._claim(asked)
                self._found_all = len(claims) < asked
                self._exchanges.note(more=not self._found_all)
                if self._found_all:
                    self._note_drained()
                    await self._wait_for_work()
                backoff.reset()
            # An error may be about a single job or key that another program wrote; the other jobs must go on.
            except (StorageUnavailable, StorageError) as error:
                self._exchanges.note(more=False)
                self._events.report(error)
                await self._stop.unless(asyncio.sleep(backoff.pause()))

    async def _claim(self, limit: int) -> list[Claim]:
        asked_at = monotonic()
        # A task of its own: neither a stop nor a cancellation may lose the claims of an answer that is on its way.
        call = asyncio.ensure_future(self._ask_for_claims(limit))
        with self._slots.reserved(limit):
            try:
                await self._stop.until(call)
                claims = await self._last_answer(call)
                self._appetite.was_read(limit)
                self._linger = min(monotonic() - asked_at, LONGEST_LINGER_SECONDS)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):
                    self._start_all(await self._last_answer(call), asked_at)
                raise
            except StorageUnavailable:
                self._appetite.was_lost(limit)
                raise
            else:
                self._start_all(claims, asked_at)
                return claims
            finally:
                self._news.tell()
                self._cancels.claimed()

    async def _ask_for_claims(self, limit: int) -> list[Claim]:
        self._cancels.claiming()
        return await self._storage.claim(self.worker_id, leases=self._wanted, limit=limit)

    async def _last_answer(self, call: asyncio.Future[list[Claim]]) -> list[Claim]:
        """Give `call` a last moment and return its claims; claims that come later are left until their leases end."""
        if not call.done():
            await asyncio.wait([call], timeout=FORCED_STOP_SECONDS)
        if not call.done():
            call.cancel()
            return []
        return call.result()

    def may_claim(self) -> bool:
        """See `Claimer.may_claim`."""
        if self._stop.asked:
            return False
        wait = self._unready()
        if wait is not None:
            wait.close()  # the claim loop waits for it
        return wait is None

    def _unready(self) -> Coroutine[object, object, None] | None:
        """Ask `not_ready`; one that raises is reported, and as good as one that waits a little."""
        try:
            return self._not_ready()
        except Exception as error:  # a bug there must not end the worker, nor keep a job from being settled
            self._events.report(error)
            return asyncio.sleep(BROKEN_CHECK_SECONDS)

    async def _until_ready(self, wait: Coroutine[object, object, None]) -> None:
        try:
            await wait
        except Exception as error:  # likewise
            self._events.report(error)
            await asyncio.sleep(BROKEN_CHECK_SECONDS)

    def start(self, claims: Sequence[Claim], asked_at: float, *, found_all: bool) -> bool:
        """See `Claimer.start`."""
        if self._stop.asked:
            return False
        self._found_all = found_all
        self._start_all(claims, asked_at)
        return True

    def _start_all(self, claims: Iterable[Claim], asked_at: float) -> None:
        for claim in claims:
            self._idle = False
            attempt = Attempt(
                *(claim, self._storage.queue, self._progress.put, self._own_transaction),
                leave=self._slots.leave,
                keep_line=self._progress.log,
                make_children=self._own_children,
                predecessors=self._predecessors,
            )
            self._attempts[claim.token] = attempt
            self._slots.take(claim.token)
            self._leases.hold(claim, since=asked_at)
            # Not in the context of whoever settles, which may be another job's attempt, and is what that has set.
            attempt.task = asyncio.create_task(
                self._run_attempt(attempt), name=f"attempt-{claim.job_id}", context=self._context.copy()
            )

    @property
    def _is_served(self) -> bool:
        """Whether a settlement that is under way, or about to be, fills free slots."""
        return self._exchanges.claim and self._settler.is_busy

    async def _wait_for_slots(self) -> None:
        """Wait for a free slot; if more jobs wait than there are slots, as long as a claim takes, to fill several."""
        self._slots.freed.clear()
        if self._stop.asked:
            return
        if self._slots.free == 0 or self._is_served:
            await self._slots.freed.wait()
        elif self._found_all:
            return
        if self._slots.free < self._concurrency // 2 and not self._is_served:
            await asyncio.sleep(self._linger)

    async def _wait_for_work(self) -> None:
        """Return when a claim may succeed, or the worker is to stop."""
        timeout = min(self._poll_interval, HEARD_EVERY)
        await self._stop.unless(self._storage.wait(tuple(self._wanted), timeout=timeout))

    async def _run_attempt(self, attempt: Attempt) -> None:
        claim = attempt.claim
        try:
            if claim.stalled is None:
                self._events.emit(WorkerEventKind.ACTIVE, claim=claim)
            ending = await self._runner.run(attempt)
            self._slots.begin_end(claim.token)
            if ending.settled:
                self._report_ending(claim, ending)
            elif ending.settlement is not None:
                await self._flush_progress(claim)
                await self._settle(attempt, ending)
        finally:
            self._leases.drop(claim)
            del self._attempts[claim.token]
            self._slots.end(claim.token)
        self._note_drained()

    def _own_transaction(self, claim: Claim) -> OwnTransaction:
        success = partial(self._runner.success, self._attempts[claim.token])
        return OwnTransaction(self._storage, claim, success=success, flush=self._flush_progress)

    async def _flush_progress(self, claim: Claim) -> None:
        if self._progress.has(claim):
            await self._progress.flush()

    async def _settle(self, attempt: Attempt, ending: Ending) -> None:
        assert ending.settlement is not None
        outcome = await self._settler.settle(ending.settlement)
        if outcome is None:
            self._events.emit(WorkerEventKind.LEASE_LOST, claim=attempt.claim)
        elif outcome.status is SettleStatus.LOST:
            self._events.emit(WorkerEventKind.LEASE_LOST, claim=attempt.claim, error=ending.error)
        elif outcome.status is SettleStatus.ERROR:
            await self._settle_otherwise(attempt, ending, outcome)
        else:
            self._report_ending(attempt.claim, ending)
            if self._failed is not None and isinstance(ending.settlement, Failed):
                await self._failed.tell_of(attempt.claim, ending.settlement)

    async def _settle_otherwise(self, attempt: Attempt, ending: Ending, outcome: SettleOutcome) -> None:
        """Fail the job if its end cannot be stored, such as too large a result: it would fail each time."""
        error = UnrecoverableError(f"job {attempt.claim.job_id!r} could not be settled: {outcome.detail}")
        self._events.report(error)
        if isinstance(ending.settlement, Completed | Continued | Suspended):
            failed = Failed(claim=attempt.claim, error=ErrorInfo.of(error), duration=ending.duration)
            await self._settle(attempt, replace(ending, settlement=failed, error=error))

    def _report_ending(self, claim: Claim, ending: Ending) -> None:
        kind, delay = WorkerEventKind.RELEASED, None
        match ending.settlement:
            case Completed():
                kind = WorkerEventKind.COMPLETED
            case Continued():
                kind = WorkerEventKind.CONTINUED
                self._found_all = False
            case Failed():
                kind = WorkerEventKind.FAILED
            case Cancelled():
                kind = WorkerEventKind.CANCELLED
            case Retried():
                kind = WorkerEventKind.SNOOZED if ending.settlement.snoozed else WorkerEventKind.FAILING
                delay = ending.settlement.delay
                self._found_all = self._found_all and delay > timedelta(0)
            case Suspended():
                kind = WorkerEventKind.SUSPENDED
            case Released() | None:
                self._found_all = False
        self._events.emit(kind, claim=claim, error=ending.error, delay=delay, duration=ending.duration)

    async def _finish(self) -> None:
        """Run phases two and three of a stop: let handlers end, then cancel them and wait for their settlements."""
        try:
            await self._stop.grace(self._running_tasks(), self._grace.total_seconds())
        finally:  # being cancelled meanwhile only ends the grace
            await self._force()

    async def _force(self) -> None:
        for attempt in list(self._attempts.values()):
            attempt.interrupt(SignalReason.SHUTDOWN)
        await all_done(self._running_tasks(), FORCED_STOP_SECONDS)
        if self._attempts:
            self._gave_up = True
            logger.error(
                "worker %s gave up on jobs that did not end: %s; they will be recovered when their leases end",
                self.worker_id,
                sorted(attempt.claim.job_id for attempt in self._attempts.values()),
            )
            left = [attempt.task for attempt in list(self._attempts.values()) if attempt.abandon() and attempt.task]
            await all_done(left, FORCED_STOP_SECONDS)

    def _running_tasks(self) -> list[asyncio.Task[None]]:
        return [attempt.task for attempt in self._attempts.values() if attempt.task is not None]

    def _lose(self, claim: Claim, reason: LossReason) -> None:
        attempt = self._attempts.get(claim.token)
        if attempt is not None and attempt.interrupt(SignalReason.LEASE_LOST, reason):
            self._events.emit(WorkerEventKind.LEASE_LOST, claim=claim)

    def _cancel(self, claim: Claim) -> None:
        attempt = self._attempts.get(claim.token)
        # Storages repeat the request until the job is settled; a handler that is cleaning up must not be disturbed.
        if attempt is not None and attempt.signal.reason is None:
            attempt.interrupt(SignalReason.CANCELLED)

    def _note_drained(self) -> None:
        if self._found_all and not self._attempts and not self._idle:
            self._idle = True
            self._events.emit(WorkerEventKind.DRAINED)
