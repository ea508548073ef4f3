"""The one seam of this package: a queue as a set of atomic transitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, Protocol, runtime_checkable

from workers.checks import MAX_DELAY
from workers.jobs import (
    CancelResult,
    Claim,
    EnqueueResult,
    JobEvent,
    JobOutcome,
    JobState,
    JobStatus,
    NewJob,
    Page,
    ProgressReport,
    Recovery,
    Renewal,
    Repaired,
    Retention,
    SetAside,
    Settlement,
    SettleOutcome,
    WorkerInfo,
)

ANY_NAME: Final = "*"
"""In `leases`: the lease of every name not listed."""

TOMBSTONE: Final = timedelta(hours=1)
"""How long a cancelled job's outcome can still be read by those who waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a storage keeps, and what it cannot; the conformance suite reads it and reports what is declared away."""

    clock: Literal["server", "machine", "client"]
    """Whose clock decides what is due: the storage server's, the one machine's, or each client's."""
    durable: bool
    """Whether jobs survive the end of the process."""
    processes: Literal["one", "machine", "many"]
    wakeup_latency: timedelta = timedelta(0)
    """How late `wait` may notice a job enqueued by another process."""
    delay_resolution: timedelta = timedelta(milliseconds=1)
    """Delays are kept to within this."""
    longest_delay: timedelta = MAX_DELAY
    """Jobs that are to wait longer are refused with `Unsupported`; a retry that is to wait longer waits this long."""
    recovery_passes: int = 1
    """How many calls of `recover` it takes after the lease expired."""
    bounded_recovery: bool = True
    """Whether `recover` keeps to its limit; otherwise one call may bring back every expired job."""
    any_id: bool = True
    """Whether any text of 1 to 512 bytes may be an id; otherwise some are refused with `Unsupported`."""
    name_filter: bool = True
    """Whether `claim` returns only the names in `leases`; otherwise the worker meets names it has no handler for."""
    ordering_keys: bool = True
    transactions: bool = False
    """Whether `connection=` joins the caller's SQL transaction, and handlers have `job.transaction()`."""
    retention_per_job: bool = True
    """Whether each record expires by its own retention in `sweep`; otherwise lazily, by the queue's."""
    result_ttl_updates: bool = True
    atomic_continuation: bool = True
    """Whether `Completed.then` appears in the very step that completes; otherwise it may show early."""
    outside_endings: bool = True
    """Whether `complete` works, and `remove` with `running`."""
    deduplication: bool = True
    """Whether `enqueue` keeps deduplication keys; otherwise it refuses them with `Unsupported`."""
    priority_order: bool = True
    """Whether lower priorities always come first."""


class Subscription(Protocol):
    """Events as they happen, from the moment the subscription was confirmed."""

    async def get(self) -> JobEvent:
        """The next event; waits for it. Cancelling loses nothing."""


@runtime_checkable
class Joinable(Protocol):
    """A storage with `limits.transactions`, as plain code without an event loop reaches it."""

    def enqueue_on(self, jobs: Sequence[NewJob], connection: object) -> list[EnqueueResult]:
        """As `Storage.enqueue` in the caller's transaction, on a synchronous connection, in the calling thread."""


@runtime_checkable
class OfOneLoop(Protocol):
    """A storage whose connections belong to the event loop in which they were made."""

    def forget_loop(self) -> None:
        """The loop is gone, and its connections with it: it is as if it had never been connected."""


@runtime_checkable
class Repairable(Protocol):
    """A storage on structures that other programs write to as well, which may hold what no worker can run.

    Such a job is out of the way of all others from the moment it is met, and nobody runs it until `repair`.
    """

    def news(self) -> list[SetAside]:
        """What this storage has set aside since it was last asked, by claims and recoveries: each is told once."""

    async def quarantine(self) -> list[SetAside]:
        """Everything that is set aside, the oldest first."""

    async def repair(self, *, drop: bool = False) -> list[Repaired]:
        """Jobs that were set aside are queued again, as new ones; a key in the way of the queue is set aside.

        What is no job, or has the id of one that is there, stays in quarantine, or goes with `drop`.
        """


class Storage(Protocol):
    """One queue: ids are unique in it, every element of a batch is one atomic step.

    Times are the storage's own where it has a clock (`limits.clock`). Every verb may raise `StorageUnavailable`:
    nothing is then known about its effect, and repeating it is safe.
    """

    @property
    def limits(self) -> Limits: ...

    @property
    def queue(self) -> str:
        """The queue's name."""

    async def connect(self) -> None:
        """The storage is reachable and prepared. Idempotent, counted: each call wants one `disconnect`."""

    async def disconnect(self) -> None:
        """With the last one of several users gone, connections made here are closed; a client passed in stays open."""

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        """Each job is in the queue, or the state of the job that already has its id is told; in the order of `jobs`.

        Whatever the race, one id is inserted once. A failed, cancelled or expired id starts a new generation: fresh
        attempts, nothing of the old record left. Of several enqueues with one `deduplication` key one inserts its jobs,
        and the others are told the id of the job that has the key; an id that exists is looked at first and takes no
        key. Retries, releases and recoveries leave keys as they are. `connection` (an SQLAlchemy
        connection or session, only with `limits.transactions`) makes the jobs part of the caller's transaction.
        """

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        """Up to `limit` due jobs are processing, each with a fresh token, one more attempt and a lease deadline.

        One atomic step. In order of priority, then first come, first served. `leases` maps the names wanted to their
        lease, `"*"` stands for every other name; see `limits.name_filter`.
        """

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        """Return when a claim for these names may succeed: something was enqueued or released, a delay ran out, or
        `timeout` passed. A hint: it may return for nothing, but never sleeps through a job that was claimable when it
        was called or became so meanwhile.
        """

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        """Extend every claim that still holds its job by its own lease, from now.

        One round trip. A claim missing from `lost` is safe for another lease. Spurious loss is not allowed; late loss
        is: a claim may be lost between two renewals.
        """

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        """Each attempt is over as said, if its token still holds the job; outcomes in the order of `settlements`.

        State, result and expiry are stored in one step. `already_applied`: this token settled the job before, as when
        the reply to the first call was lost. `lost`: another claim, or none, holds it; nothing changed. `connection` as
        in `enqueue`: the settlements then hold with that transaction, or not at all.
        """

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        """The job of every claim that still holds it has this for its progress; subscribers are told.

        Of several reports of one claim the last counts. It stays until the next report, also of a later attempt, and
        goes with the record; a new generation begins without.
        """

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        """Jobs whose lease expired are queued again, at most `limit` of them per call.

        A job recovered more than `max_stalls` times, or out of attempts, fails with `StalledError` instead. Atomic
        and idempotent: any number of reapers may run. Storages with `limits.recovery_passes` > 1 need several calls.
        """

    async def sweep(self, limit: int) -> int:
        """Remove up to `limit` of what is over: terminal records, tombstones, worker records, deduplication keys.

        Returns how many went; fewer than `limit` means that nothing is left to do.
        """

    async def cancel(self, job_id: str) -> CancelResult:
        """A job that had not started never will; for a running one the request is recorded and reported by `renew`."""

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        """The jobs as they stand, None for unknown, cancelled or expired ids; in the order of `ids`."""

    async def result(self, job_id: str) -> JobOutcome | None:
        """How the job ended, None while it has not (or is unknown)."""

    async def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state, every state present."""

    async def workers(self) -> list[WorkerInfo]:
        """The workers seen lately."""

    async def pause(self) -> None:
        """No job is claimed until `resume`; running ones go on."""

    async def resume(self) -> None:
        """Jobs are claimed again."""

    async def is_paused(self) -> bool:
        """Whether the queue waits for `resume`."""

    async def retry(self, ids: Sequence[str]) -> int:
        """Failed jobs among `ids` are queued again with fresh attempts; how many."""

    async def remove(self, ids: Sequence[str], *, running: bool = False, connection: object | None = None) -> int:
        """Jobs among `ids` are gone without a trace, those that are processing only with `running`; how many.

        The worker of a running one is told as of a cancel, and finds its claim lost with `not_found`.
        """

    async def complete(
        self, job_id: str, result: bytes, *, keep: Retention | None = None, connection: object | None = None
    ) -> JobState | None:
        """A job that had not ended is completed with `result`, by nobody's attempt; the state it was in, None: unknown.

        Nothing happens to one that had ended. The worker of a running one is told as of a cancel, and finds its claim
        lost with `already_completed`. `keep` overrides the job's own retention.
        """

    async def promote(self, ids: Sequence[str]) -> int:
        """Scheduled or failing jobs among `ids` are due now; how many."""

    async def drain(self) -> int:
        """Every queued, scheduled and failing job is gone; how many."""

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        """Up to `limit` completed or failed records that ended longer ago than `older_than` are gone; how many."""

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        """The record of a finished job lasts `ttl` from now; False for other ids. See `limits.result_ttl_updates`."""

    def events(self) -> AbstractAsyncContextManager[Subscription]:
        """Every job's changes, from the moment the context is entered."""

    def cancel_requests(self) -> AbstractAsyncContextManager[Subscription]:
        """Requests to cancel running jobs, and no other event, from the moment the context is entered.

        For workers, who would hear of them by `renew` in the end: it costs nothing while nobody cancels. A request may
        be told twice. Where one may have gone unheard, as while a connection is lost, `get` raises `StorageUnavailable`
        from then on: listen anew, and look at every claim after entering.
        """

    def subscribe(self, job_id: str) -> AbstractAsyncContextManager[Subscription]:
        """One job's changes, from the moment the context is entered; several waiters are independent.

        A subscriber that must not miss the end looks at `result` after entering: events are not replayed.
        """

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        """One page of the jobs in a state, in no promised order; a job that moves meanwhile may be missed."""
