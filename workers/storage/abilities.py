"""What some storages can do beside the contract that all of them keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Protocol, runtime_checkable

from workers.jobs import (
    Claim,
    CronLook,
    CronRow,
    Declared,
    EnqueueResult,
    JobOutcome,
    JobRef,
    JobState,
    LogLine,
    NewJob,
    Page,
    Recurrence,
    Repaired,
    Scheduled,
    SetAside,
    Settlement,
    SettleOutcome,
)
from workers.limits import HeldBack, Limit


class Severity(StrEnum):
    """How grave a fault of a server is."""

    ERROR = "error"
    """Acknowledged jobs may be lost while the server runs: a worker does not start."""
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFault:
    """What an operator should know of a storage's server, and do about it."""

    severity: Severity
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How many connections a server admits: to anybody, and to this user or this database where these have a limit."""

    maximum: int
    reserved: int
    limit: int | None = None

    @property
    def connections(self) -> int:
        free = self.maximum - self.reserved
        return free if self.limit is None else min(free, self.limit)

    def shortage(self, processes: int, *, each: int) -> str | None:
        """Return why `processes`, with up to `each` connections, are too many, and what to do; None if they fit in."""
        needed = (processes + 1) * each  # one more works while it replaces another
        if needed <= self.connections:
            return None
        told = f"max_connections {self.maximum} less {self.reserved} reserved"
        if self.limit is not None:
            told += f", {self.limit} for this user or database"
        fit = max(self.connections // each - 1, 0)
        return (
            f"{processes} processes, and one more while it replaces another, open up to {each} connections each. That "
            f"is {needed}, and the server admits {self.connections} ({told}). {fit} of them fit; run fewer, or have it "
            "admit more"
        )


@runtime_checkable
class Pooled(Protocol):
    """A storage that may be on a server whose connections are counted."""

    @property
    def connections(self) -> int:
        """How many connections a process opens at most, apart from `job.transaction()`; 0 where nobody counts them."""

    async def admission(self) -> Admission:
        """Ask the server, if `connections` is not 0."""


@runtime_checkable
class Migratable(Protocol):
    """A storage in a database that other tables share."""

    async def migrate(self) -> None:
        """Make its tables where they are missing."""


@runtime_checkable
class Joinable(Protocol):
    """A storage with `capabilities.transactions`, whose verbs with `connection=` do not need it to be connected.

    What must be written first, as the name of a new queue, goes over the caller's connection as well: one of the
    storage's own would wait for the locks of the caller's transaction.
    """

    def enqueue_on(self, jobs: Sequence[NewJob], connection: object) -> list[EnqueueResult]:
        """Enqueue, as by `Storage.enqueue`, in the caller's transaction.

        The connection is a synchronous one, used in the calling thread, without an event loop.
        """

    def bring_limits(self, limits: Mapping[str, Limit]) -> None:
        """Let the next transaction that is joined declare these limits, as by `KeepsLimits.declare_limits`.

        One that is rolled back leaves it to the next. `declare_limits` does it at once.
        """

    async def leave(self) -> None:
        """Close what was opened for callers' transactions, unless the storage is connected."""


@runtime_checkable
class OfOneLoop(Protocol):
    """A storage whose connections belong to the event loop in which they were made."""

    def forget_loop(self) -> None:
        """Forget the loop, which is gone with its connections, as if this storage had never been connected."""


@runtime_checkable
class Examined(Protocol):
    """A storage on a server whose own settings decide whether it keeps what it acknowledges.

    `connect` looks at them, and so does `recover` now and then. From then on `limits` says what is known.
    """

    def faults(self) -> list[ServerFault]:
        """Return what was found wrong at the last look, the gravest first."""


@runtime_checkable
class TakesNodeOptions(Protocol):
    """A storage on the layout of one of Node's libraries, whose jobs have options that no other storage knows."""

    def with_node_options(self, job: NewJob, options: Mapping[str, object]) -> NewJob:
        """Return the job with these options, named as by the `add` of BullMQ, to be enqueued here.

        Raises:
            Unsupported: an option that this library has not, which the message names.
            ValueError: a value that Node would not accept.
        """


@runtime_checkable
class KnowsDependencies(Protocol):
    """A storage with `capabilities.dependencies`: it tells who waits for whom, and how those ended."""

    async def followed(self, job_id: str) -> Sequence[JobRef]:
        """Return the jobs that this one still waits for; none if it does not wait for any, or is unknown."""

    async def followers(self, job_id: str, *, limit: int = 1_000) -> Sequence[JobRef]:
        """Return the jobs that wait for this one, `limit` of them at most, in no promised order."""

    async def outcomes(self, job_id: str) -> Mapping[JobRef, JobOutcome | None]:
        """Return how those jobs ended that this one came after, as far as they have ended.

        None stands for one that was removed, or that nobody knew. What is told is a copy, made in the step that ended
        the job, or by the enqueue if it had ended before. It is kept until this one ends at least, whatever becomes of
        their records, and through retries. A result of more than `COPIED_BYTES` is left out: that of a completed job is
        None then. The later links of a chain have those of the last link that came after others.
        """


@runtime_checkable
class ContinuesFromOutside(Protocol):
    """A storage with `capabilities.outside_continuations`."""

    async def continue_job(self, then: NewJob, *, connection: object | None = None) -> JobState | None:
        """Let the unfinished job of this id go on as `then`, the next link of its chain, from outside of any attempt.

        Returns the state it was in; None if it is unknown. A job that had ended stays as it is. `then` is as that of
        `Continued`: the worker of a running job is told as by a cancel, and finds its claim lost.

        Raises:
            JobEndedError: `then.chain_index` does not follow that of the current link.
        """


@runtime_checkable
class ListsInOrder(Protocol):
    """A storage with `capabilities.ordered_listing`."""

    async def list_in_order(
        self, state: JobState, *, name: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page:
        """Return one page of the jobs in a state, with a `name` those of this name: oldest first.

        They stand in the order in which they were enqueued, a chain by its current link. One that a debounce put off,
        or others released, may stand as if it was enqueued then.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What `ExchangesJobs.settle_and_claim` did."""

    outcomes: Sequence[SettleOutcome]
    """Those of the settlements, in their order."""
    claims: Sequence[Claim] | None = None
    """None: nothing was claimed, for a reason that `claim` deals with, or tells."""


@runtime_checkable
class ExchangesJobs(Protocol):
    """A storage for which it is less work to settle and claim in one round trip than in two."""

    exchanges_at_once: int
    """How many exchanges a worker should have under way: 1 with all slots each, or 2 with half of the slots each."""

    async def settle_and_claim(
        self, settlements: Sequence[Settlement], worker_id: str, *, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        """Settle as by `settle`, then claim up to `limit` jobs as by `claim`, in one round trip.

        Fewer may be claimed than there are. Errors are those of `settle`: nothing is known of the settlements, which
        may be repeated. What was claimed nevertheless is given back, uncounted; if the answer was lost, it is recovered
        when its lease is over.
        """


@runtime_checkable
class TakesLeave(Protocol):
    """A storage with `capabilities.farewells`, which workers tell that they have stopped."""

    async def farewell(self, worker_id: str) -> None:
        """List the worker no more: it has stopped, and holds no job. If it claims again, it is listed again."""


@runtime_checkable
class HoldsWakeUps(Protocol):
    """A storage with `capabilities.held_wake_ups`: many enqueues wake those who wait once."""

    def with_notify(self, connection: object | None = None) -> AbstractAsyncContextManager[None]:
        """Let enqueues in the block wake nobody until it ends, also by an error; then wake all who wait for their jobs.

        It is about the task that is in the block, and those begun inside; enqueues of others wake as ever. The jobs
        are stored at once: who looks finds them. On SQLite other processes hear of every commit, and in a directory
        they look every 50 ms. If this process dies in the block, those who wait find the jobs when they look by
        themselves.

        With `connection`, as in `enqueue`, the block tells of what that transaction commits, once it has committed.
        """


@runtime_checkable
class KeepsCrons(Protocol):
    """A storage with `capabilities.crons` and `cron_rows`: it keeps rows of what recurs, beside the jobs."""

    async def crons(self, *, due: bool = False) -> CronLook:
        """Return all rows, by name; with `due` only those that are due, at most 100, the longest due first."""

    async def replace_cron(self, row: CronRow, *, jobs: Sequence[NewJob] = ()) -> bool:
        """Replace the row whose revision is the one before this, and enqueue the jobs, in one step; or change nothing.

        The first revision of a row is 1. Returns False if the row has another revision than expected. So of any number
        of callers one replaces a row of one revision by the next, and a call that is repeated because its answer was
        lost has no effect.
        """


@runtime_checkable
class RepeatsJobs(Protocol):
    """A storage with `capabilities.crons`, but no `cron_rows`: it repeats jobs by itself, as other programs know it."""

    def refuse_cron(self, cron: Recurrence) -> None:
        """Accept what can be kept. Nothing is connected for that.

        Raises:
            Unsupported: a policy, or an option of its jobs, that the storage has no word for, which the message names.
        """

    async def declare_cron(self, cron: Recurrence) -> Declared:
        """Store the definition, unless it is stored already, or one as new is; in one step with its first job.

        If it recurs as before, its next job is due as before. A schedule that lost its next job goes on.
        """

    async def scheduled(self) -> Sequence[Scheduled]:
        """Return all that recurs in the queue, by name, also what other programs declared."""

    async def remove_cron(self, name: str) -> bool:
        """Let it never recur again, and remember its version; False if there is none of that name.

        A job that is due already may still run.
        """

    async def cron_job(self, name: str, suffix: str) -> NewJob | None:
        """Return a job of it, not enqueued, whose id ends with this; None if there is none of that name."""


@runtime_checkable
class KeepsLimits(Protocol):
    """A storage that lets only so many jobs start in a time, or run at once; see `workers.limits.Limit`.

    The limits are stored with the queue, so that all its processes agree. They count by the storage's clock. If that
    goes back, a bucket is empty at worst, and if it goes forward, full at best.
    """

    async def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """Keep each limit under its name, unless the one kept has a higher version. `"*"` is that of the whole queue.

        A limit that changes counts from the next claim. What its buckets had is kept.

        Raises:
            ValueError: a name that no limit can have.
            Unsupported: the storage keeps no such limit.
        """

    async def declared_limits(self) -> dict[str, Limit]:
        """Return the limits that are kept, by name."""

    async def remove_limit(self, name: str) -> bool:
        """Forget the limit, so that it keeps no job back any more; False if there is none of that name."""

    async def held_back(self, ids: Sequence[str]) -> list[HeldBack | None]:
        """Return which limit keeps each queued job back, in the order of `ids`; None for any other job.

        The time is that at which the next job of its key may start. Others may be in front.
        """


@runtime_checkable
class KeepsSomeLimits(KeepsLimits, Protocol):
    """A `KeepsLimits` that keeps a limit as another program does, and has no word for others."""

    def refuse_limits(self, limits: Mapping[str, Limit]) -> None:
        """Accept what can be kept. Nothing is connected for that.

        Raises:
            Unsupported: a limit that cannot, which the message names.
        """


@runtime_checkable
class KeepsLogs(Protocol):
    """A storage that keeps what handlers log beside the job, where other programs look for it."""

    async def log(self, lines: Sequence[LogLine]) -> None:
        """Add the lines, in their order, to what the jobs keep of theirs; a job that is gone keeps none.

        Bounded: a job keeps its last lines. Nobody is told whether they arrived.
        """


@runtime_checkable
class Repairable(Protocol):
    """A storage whose structures other programs write to as well, so that they may hold what no worker can run.

    From the moment it is met, such a job is kept out of the way of all others. Nobody runs it until `repair`.
    """

    def news(self) -> list[SetAside]:
        """Return what claims and recoveries have set aside since the last call: each is reported once."""

    async def quarantine(self) -> list[SetAside]:
        """Return everything that is set aside, oldest first."""

    async def repair(self, *, drop: bool = False) -> list[Repaired]:
        """Queue the jobs that were set aside again, as new ones, and set aside any key in the way of the queue.

        Jobs in no line are queued as well, if the storage is `Strandable`. Anything that is no job, or has the id of an
        existing one, stays in quarantine, or is removed with `drop`.
        """


@runtime_checkable
class Strandable(Protocol):
    """A storage on whose queues other programs may leave a job in no line, so that no worker ever finds it.

    It is `Repairable` as well: `repair` puts such jobs into the line again, with the attempts they have made. Storages
    that keep a job's state and its place in one step of their own have no such jobs.
    """

    async def stranded(self) -> Sequence[str]:
        """Return the ids of the jobs that are in no line. It takes a walk through all keys of the server's database."""
