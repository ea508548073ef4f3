"""The values by which workers end attempts and renew leases, and the storage's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Final, TypeAlias

from workers.checks import check_progress
from workers.errors import ErrorInfo, LossReason, StorageFull
from workers.jobs.job import Claim, NewJob
from workers.retention import TOLD_BYTES, Retention, chosen_for_waiters

UNCOUNTED_RETRIES: Final = 100  # in a row, before one is counted after all, so that none can loop for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The attempt succeeded. `keep` overrides the job's own retention; `then` is enqueued in the same step.

    If `then` is to follow others, those that nobody knows count as gone: nothing is refused for them. A storage that
    cannot let it follow them answers with an error, and the attempt goes on.

    A result of more than 4 KiB is kept for a minute at least, unless nothing is: too large for the event of the end,
    it has to be read.

    Raises:
        ValueError: `then` has a deduplication key, which only `enqueue` takes.
    """

    claim: Claim
    result: bytes = field(repr=False)
    keep: Retention | None = None
    then: NewJob | None = None

    def __post_init__(self) -> None:
        if len(self.result) > TOLD_BYTES:
            keep = chosen_for_waiters(self.result, self.keep, self.claim.keep_completed)
            object.__setattr__(self, "keep", keep)
        if self.then is not None and self.then.deduplication is not None:
            raise ValueError(f"job {self.then.id!r} follows a completion: it cannot have a deduplication key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The attempt succeeded, and its job goes on as `then`, the next link of its chain, under the same id.

    The record keeps its id and its date, and gets everything else from `then`, with fresh attempts. It queues behind
    the jobs that wait already. If `then` is to follow others, it is as in `Completed`.

    Raises:
        ValueError: `then` has another id, or a deduplication key: the chain keeps the one it was enqueued by.
    """

    claim: Claim
    then: NewJob

    def __post_init__(self) -> None:
        if self.then.id != self.claim.job_id:
            raise ValueError(f"job {self.claim.job_id!r} cannot be continued as {self.then.id!r}: a chain has one id")
        if self.then.deduplication is not None:
            raise ValueError(f"job {self.claim.job_id!r}: a chain has the deduplication key it was enqueued by")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed and runs again after `delay`.

    An uncounted retry gives the attempt back. After 100 in a row the next one is counted. One that was `snoozed` did
    not happen: it is never counted, and its `error` is stored nowhere. `duration` is how long it ran.
    """

    claim: Claim
    delay: timedelta
    error: ErrorInfo
    counted: bool = True
    snoozed: bool = False
    duration: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The job failed for good. `keep` overrides the job's own retention; `duration` is how long the attempt ran."""

    claim: Claim
    error: ErrorInfo
    keep: Retention | None = None
    duration: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The attempt was stopped by a request to cancel its job. `keep` overrides the job's own retention of a failure."""

    claim: Claim
    keep: Retention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The attempt did not happen: uncounted, and claimable at once."""

    claim: Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    """The attempt ends until the job's children have ended: uncounted, and claimable as soon as they have.

    If no child is unfinished, the attempt is an uncounted retry without a delay. Only with `capabilities.flows`.
    """

    claim: Claim


Settlement: TypeAlias = Completed | Continued | Retried | Failed | Cancelled | Released | Suspended


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """How far a claimed job has come: JSON of the handler's choice.

    Raises:
        ValueError: longer than 4 KiB.
    """

    claim: Claim
    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_progress(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line that the handler of a claimed job has logged."""

    claim: Claim
    text: str = field(repr=False)


class SettleStatus(StrEnum):
    """What a settlement did."""

    APPLIED = "applied"
    ALREADY_APPLIED = "already_applied"
    LOST = "lost"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleOutcome:
    """The outcome of one settlement; `reason` is set with `lost`, `detail` with `error`."""

    status: SettleStatus
    reason: LossReason | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """The claims (by token) that lost their job, and those whose job somebody asked to cancel."""

    lost: Mapping[str, LossReason] = field(default_factory=dict)
    cancel_requested: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The ids of jobs whose lease had expired: back in the queue, or failed with `StalledError`."""

    requeued: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class PartlySettled(StorageFull):
    """Some settlements need more room than the storage's server has; the others are settled.

    `outcomes` are in the order of the settlements, with None for those that may be tried again.
    """

    def __init__(self, outcomes: Sequence[SettleOutcome | None]) -> None:
        left = sum(outcome is None for outcome in outcomes)
        super().__init__(f"{left} of {len(outcomes)} settlements need more room than the storage's server has")
        self.outcomes = tuple(outcomes)
