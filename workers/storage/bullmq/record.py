"""One job as BullMQ's structures hold it, and its meaning in our terms; pure.

Theory of operation. A job is a hash, an entry in exactly one list or set (its state), and, while it is claimed, a lock
that expires with the lease. Three counters tell attempts apart: `ats` counts starts, `atm` attempts that ended and
count, `stc` lost leases. Of a job of ours `atm + stc` attempts are spent; of one that another producer enqueued `atm`,
because in BullMQ a crash is no attempt. The next or current one is one more. Whatever ends a claim changes one of the
counters or leaves the mark of its token. So a claim whose lock has merely expired can be told from one whose job
another worker has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final, TypeAlias

from workers.errors import LossReason, StorageError
from workers.jobs import (
    DROP,
    MESSAGE_CHARACTERS,
    Claim,
    ErrorInfo,
    JobRecord,
    JobState,
    JobStatus,
    SettleOutcome,
    SettleStatus,
)
from workers.storage.base import ANY_NAME
from workers.storage.bullmq.codec import (
    FAILURES_FIELD,
    KEEP_FIELD,
    SETTLED_FIELD,
    STOPPED_FIELD,
    UNCOUNTED_FIELD,
    BullMQJobOptions,
    decode_id,
    encode_id,
    read_options,
)
from workers.storage.bullmq.scripts import BullMQScripts
from workers.storage.failures import decode_failures, with_failure
from workers.storage.on_redis.node_values import (
    ERROR_FIELD,
    FOREVER,
    decode_bytes,
    decode_error,
    due_ms,
    error_fields,
    moment,
    number,
    to_ms,
    whole,
)
from workers.storage.on_redis.wire import Command, Reply
from workers.storage.rules import stalled_error

Fields: TypeAlias = Mapping[str, str]

FIELDS: Final = (
    *("name", "opts", "timestamp", "priority", "atm", "stc", "ats", "finishedOn", "pb", "failedReason", "stacktrace"),
    *("returnvalue", "progress", "rjk", SETTLED_FIELD, ERROR_FIELD, KEEP_FIELD, STOPPED_FIELD),
)
WHOLE_FIELDS: Final = (*FIELDS, "data", FAILURES_FIELD)
STATE_FIELDS: Final = ("opts", "finishedOn", "failedReason", "rjk", KEEP_FIELD, STOPPED_FIELD)
"""The fields that tell a job's state, and whether it belongs to a schedule."""
STALLED_REASON_FIELD: Final = "defa"
"""Set by BullMQ when a job stalled too often, or a child failed it: the next claim must fail it with this reason."""
STALLED_REASON: Final = "job stalled more than allowable limit"
NEVER_RAN: Final = frozenset({"StalledError", "ChildFailedError"})
"""The types of errors with which a claim fails a job that it does not run."""

FOREVER_MS: Final = to_ms(FOREVER)

_STATES: Final = {
    "active": JobState.PROCESSING,
    "completed": JobState.COMPLETED,
    "failed": JobState.FAILED,
    "prioritized": JobState.QUEUED,
    "waiting": JobState.QUEUED,
    "waiting-children": JobState.WAITING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BullMQClaim(Claim):
    """A claim with what settling needs of BullMQ's record.

    That is the id in Redis, the options as written, the leases lost before, the stacks of earlier failures, those
    failures, the uncounted retries, whether the job has a parent in a flow or a deduplication key, and whether it has
    the mark of a claim that settled it before.
    """

    key_id: str
    options: BullMQJobOptions
    stalls: int = 0
    stacks: str | None = field(default=None, repr=False)
    failures: str | None = field(default=None, repr=False)
    uncounted: int = 0
    related: bool = True
    marked: bool = True

    def failure(self, error: ErrorInfo, noted: str | None, now_ms: int) -> dict[str, object]:
        """Return the hash fields that tell of this failure, `noted` if it counts, and of those before it."""
        fields = error_fields(error, self.stacks, self.options.stacks_kept)
        failures = with_failure(self.failures, noted, moment(now_ms))
        return fields if failures is None else {**fields, FAILURES_FIELD: failures}

    @property
    def raw(self) -> str:
        """The id in Redis; a claim whose public id was replaced is about another job."""
        return self.key_id if decode_id(self.key_id) == self.job_id else encode_id(self.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class BullMQRecord:
    """A job as it was at `now_ms`; `fields` is empty if there is none."""

    raw: str
    fields: Fields
    place: str
    lock: str | None
    due_ms: int | None
    now_ms: int
    options: BullMQJobOptions = field(default_factory=BullMQJobOptions)

    @property
    def stalls(self) -> int:
        """The number of leases lost."""
        return whole(self.fields.get("stc"))

    @property
    def spent(self) -> int:
        """The number of attempts used, by ending or, if the job is ours, by a lost lease."""
        return _spent(whole(self.fields.get("atm")), self.stalls, self.options)

    @property
    def runs(self) -> int:
        """The number of attempts that ran. Failing a job that must not run takes a claim too, but no run.

        Of a job that stalled too often and is not ours, BullMQ counts that claim in the place of those whose lease was
        lost.
        """
        kind = self.error.type if self.place == "failed" and self.error is not None else None
        never_ran = kind in NEVER_RAN and (self.options.ours or kind != "StalledError")
        return self.spent + (self.place == "active") - never_ran

    @property
    def state(self) -> JobState | None:
        """The public state; None for no job, an orphaned hash, and a finished job whose retention is over."""
        if not self.fields or self.place == "unknown":
            return None
        if self.place == "delayed":
            if self.due_ms is not None and self.due_ms <= self.now_ms:
                return JobState.QUEUED
            return JobState.FAILING if "failedReason" in self.fields else JobState.SCHEDULED
        state = _STATES.get(self.place)
        if state is not None and self._expired(state):
            return None
        return JobState.CANCELLED if state is JobState.FAILED and self._stopped else state

    @property
    def _stopped(self) -> bool:
        """Whether the end that the record tells of is the one by which the job was cancelled."""
        stopped = self.fields.get(STOPPED_FIELD)
        return stopped is not None and stopped == self.fields.get("finishedOn")

    def _expired(self, state: JobState) -> bool:
        finished = number(self.fields.get("finishedOn"))
        if finished is None or state not in (JobState.COMPLETED, JobState.FAILED):
            return False
        keep_ms = number(self.fields.get(KEEP_FIELD))
        if keep_ms is None:
            keep = self.options.keep_completed if state is JobState.COMPLETED else self.options.keep_failed
            keep_ms = FOREVER_MS if keep is DROP else to_ms(keep)
        return finished + keep_ms <= self.now_ms

    @property
    def error(self) -> ErrorInfo | None:
        """The last failure."""
        spent = self.spent >= self.options.max_attempts and self.place == "failed"
        read = self.fields.get
        return decode_error(read("failedReason"), read("stacktrace"), read(ERROR_FIELD), exhausted=spent)

    def status(self) -> JobStatus | None:
        """Return the job's public status."""
        state = self.state
        if state is None:
            return None
        processing = state is JobState.PROCESSING
        finished = number(self.fields.get("finishedOn"))
        waits = state in (JobState.SCHEDULED, JobState.FAILING)
        return JobStatus(
            id=decode_id(self.raw),
            name=self.fields.get("name", ""),
            state=state,
            attempt=self.runs,
            max_attempts=self.options.max_attempts,
            created_at=moment(whole(self.fields.get("timestamp"))),
            chain_index=self.options.chain_index,
            priority=whole(self.fields.get("priority")),
            next_run_at=moment(self.due_ms) if waits and self.due_ms is not None else None,
            finished_at=None if finished is None else moment(finished),
            worker_id=worker_of(self.lock or self.fields.get("pb")) if processing else None,
            last_error=None if state is JobState.CANCELLED else self.error,
            encoded_progress=None if (progress := self.fields.get("progress")) is None else decode_bytes(progress),
        )


def whole_record(found: BullMQRecord) -> JobRecord | None:
    """Return all that is kept of a job that was read with `WHOLE_FIELDS`."""
    status = found.status()
    if status is None:
        return None
    payload, result = found.fields.get("data"), found.fields.get("returnvalue", "null")
    return JobRecord(
        status=status,
        payload=None if payload is None else decode_bytes(payload),
        result=decode_bytes(result) if status.state is JobState.COMPLETED else None,
        failures=decode_failures(found.fields.get(FAILURES_FIELD)),
        meta=found.options.meta,
    )


def reading(lua: BullMQScripts, raw: str, names: Sequence[str] = FIELDS) -> tuple[Command, ...]:
    """Return the commands whose replies `record` takes, with the same `names`."""
    return (
        ("HMGET", lua.job(raw), *names),
        lua.state(raw),
        ("GET", lua.lock(raw)),
        ("ZSCORE", lua["delayed"], raw),
    )


def record(raw: str, replies: Sequence[object], now_ms: int, names: Sequence[str] = FIELDS) -> BullMQRecord:
    """Return the record from the replies to `reading`.

    Raises:
        StorageError: a key has the wrong type, so this is no queue of BullMQ.
    """
    for reply in replies:
        if isinstance(reply, StorageError):
            raise reply
    values, place, lock, score = replies
    assert isinstance(values, list)
    fields = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    return BullMQRecord(
        raw=raw,
        fields=fields,
        place=str(place),
        lock=lock if isinstance(lock, str) else None,
        due_ms=due_ms(score),
        now_ms=now_ms,
        options=read_options(fields.get("opts"), raw),
    )


def _last_error(fields: Mapping[str, str]) -> ErrorInfo | None:
    return decode_error(*map(fields.get, ("failedReason", "stacktrace", ERROR_FIELD)), exhausted=False)


def make_claim(reply: Reply, token: str, worker_id: str, leases: Mapping[str, timedelta]) -> BullMQClaim:
    """Return the claim of a job as `moveToActive` answered it; missing fields give an empty name, payload or date."""
    flat, raw, *_ = reply
    fields: dict[str, str] = dict(zip(flat[::2], flat[1::2], strict=True))
    options = read_options(fields.get("opts"), raw)
    name = fields.get("name", "")
    ended, stalls = whole(fields.get("atm")), whole(fields.get("stc"))
    spent, reason = _spent(ended, stalls, options), fields.get(STALLED_REASON_FIELD)
    return BullMQClaim(
        job_id=decode_id(raw),
        name=name,
        payload=decode_bytes(fields.get("data", "")),
        token=token,
        worker_id=worker_id,
        lease=leases.get(name) or leases.get(ANY_NAME) or max(leases.values()),
        attempt=spent + 1,
        max_attempts=options.max_attempts,
        created_at=moment(whole(fields.get("timestamp"))),
        keep_completed=options.keep_completed,
        keep_failed=options.keep_failed,
        priority=whole(fields.get("priority")),
        backoff=options.backoff,
        named_backoff=options.named_backoff,
        chain_index=options.chain_index,
        last_error=_last_error(fields) if "failedReason" in fields else None,
        meta=options.meta,
        stalled=_deferred_failure(reason) or _stalled(ended, stalls, options, reason),
        key_id=raw,
        options=options,
        stalls=stalls,
        stacks=fields.get("stacktrace"),
        failures=fields.get(FAILURES_FIELD),
        uncounted=whole(fields.get(UNCOUNTED_FIELD)),
        related="parentKey" in fields or "deid" in fields or "parent" in fields,
        marked=SETTLED_FIELD in fields,
    )


def _spent(ended: int, stalls: int, options: BullMQJobOptions) -> int:
    return ended + stalls if options.ours else ended


def _deferred_failure(reason: str | None) -> ErrorInfo | None:
    """Return why BullMQ wants the job failed without a run, in its words, if not because it stalled."""
    if reason is None or reason == STALLED_REASON:
        return None
    by_child = reason.startswith("child ") and reason.endswith(" failed")
    kind = "ChildFailedError" if by_child else "UnrecoverableError"
    return ErrorInfo(type=kind, message=reason[:MESSAGE_CHARACTERS])


def _stalled(ended: int, stalls: int, options: BullMQJobOptions, reason: str | None) -> ErrorInfo | None:
    """Return why the job must not run again; `reason` is BullMQ's, which is what others expect to read of their jobs.

    A job that used up its attempts by failing was retried by an operator: it may run.
    """
    if not options.ours:
        return None if reason is None else ErrorInfo(type="StalledError", message=reason)
    most = options.max_attempts
    exhausted = stalls > 0 and ended < most <= ended + stalls
    if reason is None and not exhausted:
        return None
    error = stalled_error(worker=None, attempts=ended + stalls, max_attempts=most, stalls=stalls)
    return replace(error, exhausted=exhausted)


def worker_of(token: str | None) -> str | None:
    """Return the worker that made a token; Node and stock Python workers use `<id>:<number>` too."""
    return None if token is None else token.rpartition(":")[0] or token


def cancelled_run(starts: str | None, stalls: str | None) -> str:
    """Return the value of `CANCEL_FIELD` for a request about the job as it is now, with these `ats` and `stc`."""
    return str(whole(starts) - whole(stalls))


def still_holds(claim: BullMQClaim, found: BullMQRecord) -> bool:
    """Tell whether the claim's lock has merely expired, or is back.

    If so, nobody has recovered, settled or taken the job since.
    """
    if found.place != "active" or found.fields.get(SETTLED_FIELD) == claim.token:
        return False
    if found.lock is not None:
        return found.lock == claim.token
    return found.fields.get("pb") == claim.token and _is_the_run_of(claim, found)


def _is_the_run_of(claim: BullMQClaim, found: BullMQRecord) -> bool:
    """Tell whether the next or current attempt of the job is that of the claim."""
    return (found.spent + 1, found.stalls) == (claim.attempt, claim.stalls)


def loss(found: BullMQRecord) -> LossReason:
    """Return why a claim that does not hold its job lost it."""
    if not found.fields:
        return LossReason.NOT_FOUND
    return LossReason.COMPLETED if found.place in ("completed", "failed") else LossReason.TAKEN


def verdict(claim: BullMQClaim, found: BullMQRecord) -> SettleOutcome:
    """Return the outcome of a settlement by a claim that does not hold its job.

    Either its token settled the job before, or the claim is lost.
    """
    mark, was_last = found.fields.get(SETTLED_FIELD), found.fields.get("pb") == claim.token
    settled_here = mark == claim.token and found.place != "active"
    # The first completion, releases and waits for children leave no mark. But then nobody has claimed the job since.
    ended = (found.spent, found.stalls) == (claim.attempt, claim.stalls)
    completed_here = found.place == "completed" and mark is None and ended
    released_here = found.place in ("waiting", "prioritized", "waiting-children") and _is_the_run_of(claim, found)
    if settled_here or (was_last and (completed_here or released_here)):
        return SettleOutcome(status=SettleStatus.ALREADY_APPLIED)
    return SettleOutcome(status=SettleStatus.LOST, reason=loss(found))


def own_claim(claim: Claim) -> BullMQClaim:
    """Return the claim, which this storage has made.

    Raises:
        StorageError: another storage has.
    """
    if not isinstance(claim, BullMQClaim):
        raise StorageError(f"job {claim.job_id!r}: this claim was made by another storage")
    return claim
