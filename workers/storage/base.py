"""The storage contract: a queue as a set of atomic transitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, Protocol, runtime_checkable

from workers.checks import MAX_DELAY
from workers.jobs import (
    CancelResult,
    ChildrenPage,
    Claim,
    EnqueueResult,
    FlowNode,
    JobEvent,
    JobOutcome,
    JobRecord,
    JobState,
    JobStatus,
    Moved,
    NewJob,
    Page,
    ProgressReport,
    Recovery,
    Renewal,
    Retention,
    Settlement,
    SettleOutcome,
    WorkerInfo,
)

ANY_NAME: Final = "*"
"""In `leases`: the lease of every name not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a storage keeps, and what it cannot keep. The conformance suite reports what is declared away here."""

    clock: Literal["server", "machine", "client"]
    """The clock that decides what is due: that of the storage's server, of the machine, or of each client."""
    durable: bool | None
    """Whether jobs survive the end of the process, and of the storage's server, also a crash.

    None: it depends on how the server is set up, and that is not known. See `Examined`.
    """
    processes: Literal["one", "machine", "many"]
    wakeup_latency: timedelta = timedelta(0)
    """How late `wait` may notice a job enqueued by another process."""
    delay_resolution: timedelta = timedelta(milliseconds=1)
    """Delays are kept with this precision."""
    longest_delay: timedelta = MAX_DELAY
    """A job with a longer delay is refused with `Unsupported`; a longer delay of a retry is shortened to this."""
    recovery_passes: int = 1
    """How many calls of `recover` it takes to bring a job back after its lease expired; those before that count."""
    recovery_interval: timedelta | None = None
    """Reapers call `recover` at least this often, however long the leases are; None leaves it to them. A crashed job is
    back when its lease and this time are over.
    """
    bounded_recovery: bool = True
    """Whether `recover` obeys its limit; otherwise one call may bring back every expired job."""
    any_id: bool = True
    """Whether any text of 1 to 512 bytes may be an id; otherwise some are refused with `Unsupported`."""
    chosen_ids: bool = True
    """Whether producers choose ids; otherwise each has to be one from the storage's `next_id`."""
    name_filter: bool = True
    """Whether `claim` returns only the names in `leases`; otherwise workers get jobs they have no handler for."""
    ordering_keys: bool = True
    limit_keys: bool = False
    """Whether jobs have limit keys and fair keys, and the storage is a `KeepsLimits`; otherwise `enqueue` refuses these
    keys with `Unsupported`, and the storage keeps no limits, or only some: see `KeepsSomeLimits`.
    """
    transactions: bool = False
    """Whether `connection=` joins the caller's SQL transaction, and handlers have `job.transaction()`."""
    retention_per_job: bool = True
    """Whether `sweep` removes each record by its own retention; otherwise records expire lazily, by the queue's."""
    fresh_retries: bool = True
    """Whether `retry` gives a job fresh attempts; otherwise the old ones count on, and it has at least one more."""
    result_ttl_updates: bool = True
    lost_attempts_noted: bool = True
    """Whether `JobRecord.failures` has attempts whose worker vanished; otherwise only those that their worker ended."""
    atomic_continuation: bool = True
    """Whether `Completed.then` appears in the same step as the completion; otherwise it may show early."""
    outside_endings: bool = True
    """Whether `complete` works, and `remove` with `running`."""
    outside_continuations: bool = False
    """Whether a chain goes on from outside of any attempt; see `ContinuesFromOutside`."""
    deduplication: bool = True
    """Whether `enqueue` keeps deduplication keys; otherwise it refuses them with `Unsupported`."""
    results_told: bool = True
    """Whether a small result that is soon gone travels with the event of the end, as `Storage.subscribe` says."""
    flows: bool = False
    """Whether jobs may have children in other queues, on whose results they wait; see `FlowStorage`."""
    priority_order: bool = True
    """Whether lower priorities always come first."""
    urgent_priorities: bool = True
    """Whether there are priorities above the default, -1 000 ... -1; otherwise `enqueue` refuses them with
    `Unsupported`.
    """
    works_when_full: bool = True
    """Whether jobs are claimed, settled, cancelled and removed while the server takes no new ones because its memory is
    full (`StorageFull`), so that it has room again when they are worked off.
    """
    dependencies: bool = True
    """Whether jobs can follow others of their queue; otherwise `enqueue` refuses `NewJob.after` with `Unsupported`."""
    dependencies_across_queues: bool = False
    """Whether they can follow jobs of other queues of the same database; otherwise `NewJob.after_elsewhere` is refused
    in the same way.
    """
    crons: bool = False
    """Whether it keeps what recurs; see `KeepsCrons` and `RepeatsJobs`."""
    cron_rows: bool = True
    """Whether it keeps that in rows which workers replace; otherwise it is a `RepeatsJobs`: what recurs cannot be
    paused, and one job stands for all times that were missed.
    """
    farewells: bool = False
    """Whether a worker that stops is listed no more; see `TakesLeave`. Otherwise it is until its record expires."""
    ordered_listing: bool = False
    """Whether jobs are listed in the order of their age, and by name; see `ListsInOrder`."""
    held_wake_ups: bool = False
    """Whether many enqueues can wake those who wait once; see `HoldsWakeUps`."""
    cancelled_apart: bool = True
    """Whether a cancelled job has a state of its own; otherwise it is a failed record with a mark of ours. Other
    programs on the queue see a failed job and may retry it, after which it does not count as cancelled any more.
    """


class Subscription(Protocol):
    """Events as they happen, from the moment the subscription was confirmed."""

    async def get(self) -> JobEvent:
        """Return the next event, waiting for it. A cancelled call loses no event."""


class Storage(Protocol):
    """One queue. Ids are unique in it, and each element of a batch is one atomic step.

    Times are the storage's own where it has a clock (`capabilities.clock`). Every method may raise
    `StorageUnavailable`: nothing is then known about its effect, and repeating the call is safe.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def queue(self) -> str:
        """The queue's name."""

    async def connect(self) -> None:
        """Make the storage reachable and prepared. Idempotent and counted: each call needs one `disconnect`."""

    async def disconnect(self) -> None:
        """Close the connections made here when the last of several users leaves; a client passed in stays open."""

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        """Insert each job, or report the state of the job that has its id. Results follow the order of `jobs`.

        An id is inserted once, however many callers race. Enqueueing a failed, cancelled or expired id starts a new
        generation: fresh attempts, nothing of the old record left. Only this and `retry` make a cancelled id run again.
        Of several enqueues with one `deduplication` key, one inserts its jobs and the others are told the id of the job
        that has the key. An existing id is noticed first and takes no key. Retries, releases and recoveries leave keys
        as they are.

        A job with `after` waits until the jobs of these ids have ended, whatever ends them, and is released in the step
        that ends the last of them. If one fails, is cancelled or removed, `after_failure` decides. What has ended
        before the enqueue counts as if it ended then. A chain ends with its last link. An earlier job of the same call
        can be followed; a new generation of an ended id is another job. Time for a key by `throttle` counts from the
        enqueue here.

        With `connection` (an SQLAlchemy connection or session, only with `capabilities.transactions`) the jobs
        become part of the caller's transaction.

        Raises:
            UnknownDependency: a new job would have to follow an unknown one with `after_failure` `fail`. Nothing was
                stored. With `run` an unknown job counts as ended.
        """

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        """Claim up to `limit` due jobs.

        Each is now processing, with a fresh token, one more attempt and a lease deadline. All of them are claimed in
        one atomic step, by priority, then first come, first served. Of the jobs of one priority with fair keys each key
        has its turn. `leases` maps the wanted names to their lease;
        `"*"` stands for every other name. See `capabilities.name_filter`.
        """

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        """Return when a claim for these names may succeed.

        That is when something was enqueued or released, a delay ran out, or `timeout` passed. A wake-up is a hint: the
        call may return for nothing, but it never sleeps through a job that was claimable when it was called or became
        so meanwhile.
        """

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        """Extend every claim that still holds its job by its own lease, counted from now.

        One round trip. A claim missing from `lost` is safe for another lease. No claim that still holds its job is
        reported lost, but a loss may be reported late: a claim may be lost between two renewals.
        """

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        """End each attempt as its settlement says, if its token still holds the job.

        Outcomes follow the order of `settlements`. State, result and expiry are stored in one step. `already_applied`:
        this token settled the job before, for example when the reply to the first call was lost. `lost`: another claim
        holds the job, or none does; nothing changed. With `connection`, as in `enqueue`, the settlements take effect
        with that transaction, or not at all.
        """

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        """Store this progress for the job of every claim that still holds it, and tell subscribers.

        Of several reports of one claim the last counts. Progress stays until the next report, even one of a later
        attempt, and goes with the record. A new generation begins without any.
        """

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        """Queue jobs again whose lease expired, at most `limit` of them per call.

        A lease that ends later than in `LONGEST_LEASE` was given before the clock was set back: it is shortened to
        `SILENT_AFTER`, within which a worker that lives renews it. BullMQ's and Bull's locks are ended by Redis itself.

        A job that was recovered more than `max_stalls` times, or has no attempt left, fails with `StalledError`
        instead. Atomic and idempotent: any number of reapers may run. Storages with `capabilities.recovery_passes` > 1
        need several calls.
        """

    async def sweep(self, limit: int) -> int:
        """Remove up to `limit` expired entries: terminal records, worker records, deduplication keys.

        Returns how many were removed; fewer than `limit` means that none is left.
        """

    async def cancel(self, job_id: str) -> CancelResult:
        """Cancel a waiting job, or record the request for a running one, for `renew` to report.

        A cancelled job never runs again, and its record lasts as long as that of a failed one. A running job becomes
        cancelled when its worker settles it as `Cancelled`. Cancelling a cancelled job changes nothing and returns
        `cancelled`.
        """

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        """Return the jobs as they stand, in the order of `ids`; None for unknown or expired ids."""

    async def read(self, ids: Sequence[str]) -> list[JobRecord | None]:
        """Return all that is kept of the jobs, in the order of `ids`; None for unknown or expired ids.

        The payload is there until the job completes, and may be gone from then on; the result is that of a completed
        job. `failures` are the last 20 attempts that counted and failed, oldest first, also those whose worker
        vanished: see `capabilities.lost_attempts_noted`. They begin anew with a generation, a link of a chain, or
        `retry`, and may be gone when the job has completed.
        """

    async def result(self, job_id: str) -> JobOutcome | None:
        """Return how the job ended; None while it has not, or if it is unknown."""

    async def counts(self) -> dict[JobState, int]:
        """Return how many jobs are in each state, with every state present."""

    async def waiting_since(self) -> datetime | None:
        """Return since when the queued job that has waited longest could be claimed; None if none is queued.

        It costs little whatever the backlog. A job that its ordering key holds back may not count. BullMQ and Bull look
        at the first in each line only, and count from its enqueue.
        """

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers seen lately, those that died not long ago among them; see `WorkerInfo.is_silent`."""

    async def pause(self) -> None:
        """Let no job be claimed until `resume`. Running jobs go on."""

    async def resume(self) -> None:
        """Let jobs be claimed again."""

    async def is_paused(self) -> bool:
        """Tell whether the queue is paused."""

    async def retry(self, ids: Sequence[str]) -> Moved:
        """Queue the failed and cancelled jobs among `ids` again, with fresh attempts, and return how many, and which.

        See `capabilities.fresh_retries`. They follow nobody any more, and jobs that failed because of them stay so.
        """

    async def remove(self, ids: Sequence[str], *, running: bool = False, connection: object | None = None) -> int:
        """Remove the jobs among `ids` without a trace and return how many.

        Jobs that are processing are removed only with `running`. The worker of a running job is told as by a cancel,
        and finds its claim lost with `not_found`.
        """

    async def complete(
        self, job_id: str, result: bytes, *, keep: Retention | None = None, connection: object | None = None
    ) -> JobState | None:
        """Complete an unfinished job with `result`, from outside of any attempt.

        Returns the state it was in; None if it is unknown. A job that had ended stays as it is. The worker of a running
        job is told as by a cancel, and finds its claim lost with `already_completed`. `keep` overrides the job's own
        retention.
        """

    async def promote(self, ids: Sequence[str]) -> int:
        """Make the scheduled, failing or waiting jobs among `ids` due now, and return how many.

        A job that was waiting follows nobody any more.
        """

    async def drain(self) -> int:
        """Remove every queued, scheduled, failing and waiting job, and return how many."""

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        """Remove up to `limit` records in a final state that ended more than `older_than` ago; return how many."""

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        """Keep the record of a finished job for `ttl` from now; return False for ids of other jobs.

        See `capabilities.result_ttl_updates`.
        """

    def events(self) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to every job's changes, from the moment the context is entered."""

    def cancel_requests(self) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to requests to cancel running jobs, and to no other event.

        Subscribing takes effect the moment the context is entered. This is for workers. They would learn of a request
        from `renew` in the end, but later; listening costs nothing while nobody cancels. A request may be reported
        twice. When one may have been missed, as while a connection is lost, `get` raises `StorageUnavailable` from then
        on: subscribe again, and look at every claim after entering.
        """

    def subscribe(self, job_id: str) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to one job's changes, from the moment the context is entered; several waiters are independent.

        A subscriber that must not miss the end looks at `result` after entering, because events are not replayed. A
        result that is kept for less than a minute, or not at all, travels with the event `completed` if it has at most
        4 KiB; see `capabilities.results_told`. Larger ones are kept for a minute, unless nothing is.
        """

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Return one page of the jobs in a state, in no promised order.

        A job that changes its state meanwhile may be missed.
        """


@runtime_checkable
class FlowStorage(Storage, Protocol):
    """A storage with `capabilities.flows`: its queues, and others on the same server, have jobs that wait for jobs."""

    async def enqueue_flow(self, nodes: Sequence[FlowNode], claim: Claim | None = None) -> list[EnqueueResult | None]:
        """Insert the jobs of one tree, or of several trees as further children of the claimed job: all or none.

        A job whose id exists stays as it is, as by `Storage.enqueue`, and becomes a child of its new parent. What is
        below it in the list is not inserted, and answered with None. An id that is among the children of the claimed
        job already is a duplicate, even if its record is gone.

        Raises:
            LeaseLost: another claim holds the job, or none does.
            StorageError: one of the ids exists as the child of another job; nothing was inserted.
        """

    async def children(self, claim: Claim, *, limit: int, cursor: str | None) -> ChildrenPage:
        """Return about `limit` children that have ended, and how many have not; with a `limit` of 0 only that."""
