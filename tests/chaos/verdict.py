"""Judges a round: what the ledgers say was promised against what the storage says in the end.

Made to raise no false alarm, whatever is slow: a call takes effect at some instant between being asked and answered,
and only what holds for every such instant counts.

- *Nothing is lost:* an acknowledged job has an ending, one that its kind allows; there are no jobs that nobody sent.
  One that leaves no record was settled by somebody.
- *Results are intact:* a result quotes its job's payload, and comes from the job's last attempt.
- *One live claim:* a claim surely holds its job from its answer until the lease that was last granted ends (counted
  from when that was asked), or until its worker first asks to settle, if that was applied: a token that settles or
  renews held the job all the time before. No other claim of the job, or of its ordering key, is asked and answered
  within that time. No token is handed out twice.
- *Settled once:* at most one claim of a job is told that it ended it, and then that claim's result stands; a claim that
  was told it is lost never ended the job.
- *Attempts are counted:* no two claims of a job have the same number, unless one was given back; none has one above the
  job's maximum, and the job's own count is no smaller.
- *Not before its time:* a delayed job is not claimed before the delay is over, counted from its first enqueue; one that
  follows others not before somebody asked to settle each of them. It fails because of one only if that may fail.
- *Limits are kept:* no job is claimed while as many of its limit key as may run at once surely hold theirs. Within any
  time no more are claimed than the bucket had tokens for.
- *A tick is enqueued once:* each time of what recurs has a job, that job runs, and its attempts are numbered as any
  other's. Its record is gone when it has ended, so a second enqueue would run it again, from attempt 1.
- *Nothing runs that nobody sent.*
- *Cancelled means never run:* no claim is asked for after the cancellation was answered.
- *The states add up,* and nothing is left queued or processing.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

from tests.chaos import demands
from tests.chaos.demands import Kind
from workers import JobState, JobStatus, Limit
from workers.jobs import CancelResult, EnqueueStatus, JobOutcome, OutcomeKind, SettleStatus
from workers.limits import LimitKey

SLACK_SECONDS: Final = 0.02
"""Leases are counted by wall clocks, ledgers by the monotonic one, and those may drift apart this much in a round."""

NO_RECORD: Final = "no record"

_HELD: Final = {SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED}
_ENDINGS: Final[dict[Kind, set[str]]] = {
    Kind.PLAIN: {"completed"},
    Kind.FLAKY: {"completed"},
    Kind.DOOMED: {"UnrecoverableError"},
    Kind.MORTAL: {"completed", "StalledError"},
    Kind.DROPPED: {NO_RECORD},
    Kind.CANCELLED: {"completed", "cancelled"},
}


@dataclass(slots=True, kw_only=True)
class Held:
    """A claim as its worker's ledger has it."""

    job_id: str
    token: str
    attempt: int
    lease: float
    asked: float
    answered: float
    granted: float
    """When the lease was last asked for with success."""
    settling: float | None = None
    """When its settlement was first asked for."""
    released: bool = False
    """Whether it was to be given back, uncounted."""
    told: set[str] = field(default_factory=set)
    """What its settlements answered."""
    ended: bool = False
    """Whether a settlement that ends the job was applied."""

    def began_before(self, other: Held) -> bool:
        """Whether it was claimed before the other was asked for, or by the same call."""
        return self.answered <= other.asked or (self.asked, self.answered) == (other.asked, other.answered)

    @property
    def surely_until(self) -> float:
        """Until when no other claim can have taken the job."""
        if self.settling is not None and self.told & _HELD:
            return self.settling
        lease_end = self.granted + self.lease - SLACK_SECONDS
        return lease_end if self.settling is None else min(self.settling, lease_end)


@dataclass(slots=True)
class Books:
    """All ledgers of a round in one."""

    seed: str
    ordered: bool = True
    """Whether the storage keeps ordering keys."""
    followed: bool = True
    """Whether it lets jobs follow others."""
    limited: bool = True
    """Whether it keeps limits."""
    intended: dict[str, float] = field(default_factory=dict)
    """By id, when it was first sent."""
    repeated: set[str] = field(default_factory=set)
    """Sent more than once, as nobody knew whether the first had arrived."""
    acknowledged: set[str] = field(default_factory=set)
    cancelled: dict[str, float] = field(default_factory=dict)
    """By id, when its cancellation was answered."""
    claims: dict[str, Held] = field(default_factory=dict)
    """By token."""
    problems: list[str] = field(default_factory=list)
    """What is wrong by itself."""
    troubles: int = 0
    """How often a process was told that the storage is unavailable."""

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """One process's ledger, in its order."""
        for line in lines:
            if reader := getattr(self, f"_read_{line['what']}", None):
                reader(line)

    def expect_ticks(self, ticks: Mapping[str, float]) -> None:
        """What recurred had to be enqueued, each tick at its time."""
        self.intended.update(ticks)
        self.acknowledged.update(ticks)

    def _read_intended(self, line: Mapping[str, Any]) -> None:
        for job_id in line["ids"]:
            if job_id in self.intended:
                self.repeated.add(job_id)
            self.intended[job_id] = min(line["asked"], self.intended.get(job_id, line["asked"]))

    def may_have_lived_twice(self, job_id: str) -> bool:
        """Whether it can have been over, and been sent again: then it began anew, with fresh attempts."""
        passing = (Kind.DOOMED, Kind.MORTAL, Kind.DROPPED)
        passes = demands.kind_of(self.seed, job_id) in passing or demands.may_give_up(self.seed, job_id)
        return job_id in self.repeated and passes

    def _read_acknowledged(self, line: Mapping[str, Any]) -> None:
        self.acknowledged.update(line["ids"])
        for job_id, status in zip(line["ids"], line["statuses"], strict=True):
            if line["fresh"] and status != EnqueueStatus.QUEUED:
                self.problems.append(f"{job_id}: sent for the first time, and told it is there ({status})")

    def _read_cancelled(self, line: Mapping[str, Any]) -> None:
        if line["answer"] == CancelResult.CANCELLED:
            self.cancelled[line["id"]] = line["answered"]
        elif line["answer"] == CancelResult.NOT_FOUND and line["fresh"]:
            self.problems.append(f"{line['id']}: acknowledged, but not found when its producer cancelled it")

    def _read_claimed(self, line: Mapping[str, Any]) -> None:
        asked, answered = line["asked"], line["answered"]
        for job_id, token, attempt, lease in line["claims"]:
            if token in self.claims:
                self.problems.append(f"{job_id}: its token was handed out before, for {self.claims[token].job_id}")
            self.claims[token] = Held(
                job_id=job_id,
                token=token,
                attempt=attempt,
                lease=lease,
                asked=asked,
                answered=answered,
                granted=asked,
            )

    def _read_renewed(self, line: Mapping[str, Any]) -> None:
        for token in line["tokens"]:
            self.claims[token].granted = line["asked"]

    def _read_settling(self, line: Mapping[str, Any]) -> None:
        for token in line["tokens"]:
            claim = self.claims[token]
            claim.settling = line["asked"] if claim.settling is None else claim.settling
            claim.released = claim.released or token in line["released"]

    def _read_settled(self, line: Mapping[str, Any]) -> None:
        for token, ends, status, _ in line["outcomes"]:
            claim = self.claims[token]
            claim.told.add(status)
            claim.ended = claim.ended or (ends and status in _HELD)
            if status == SettleStatus.ERROR:
                self.problems.append(f"{claim.job_id}: could not be settled")

    def _read_trouble(self, line: Mapping[str, Any]) -> None:
        self.troubles += 1
        if not line["expected"]:
            self.problems.append(f"a worker met {line['error']}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the storage says of a job when all is over."""

    status: JobStatus | None
    outcome: JobOutcome | None

    @property
    def kind(self) -> str:
        """How it ended: the type of its error, if it failed; its state, if it has not ended; or `NO_RECORD`."""
        if self.outcome is None:
            return self.status.state.value if self.status else NO_RECORD
        if self.outcome.kind is OutcomeKind.FAILED:
            return self.outcome.error.type if self.outcome.error else "a failure without an error"
        return self.outcome.kind.value


def judge(books: Books, endings: Mapping[str, Ending], counts: Mapping[JobState, int]) -> list[str]:
    """Everything that is wrong."""
    by_job: dict[str, list[Held]] = defaultdict(list)
    for claim in books.claims.values():
        by_job[claim.job_id].append(claim)
    return [
        *books.problems,
        *_wrong_sums(endings, counts),
        *(f"{job_id}: claimed, and nobody sent it" for job_id in by_job if job_id not in endings),
        *_overlaps(books),
        *(problem for key, claims in limited(books).items() for problem in _beyond(key, claims)),
        *_too_early(books, by_job),
        *(
            f"{job_id}: {problem}"
            for job_id, ending in endings.items()
            for problem in _wrong_with(books, job_id, by_job[job_id], ending)
        ),
    ]


def _wrong_sums(endings: Mapping[str, Ending], counts: Mapping[JobState, int]) -> Iterator[str]:
    found = Counter(ending.status.state for ending in endings.values() if ending.status)
    for state in JobState:
        if counts[state] != found[state]:
            yield f"{counts[state]} jobs are counted as {state.value}, {found[state]} of those sent are"


def _overlaps(books: Books) -> Iterator[str]:
    sharing: dict[str, list[Held]] = defaultdict(list)
    for claim in books.claims.values():
        sharing[f"job {claim.job_id}"].append(claim)
        if books.ordered and (key := demands.job_of(books.seed, claim.job_id).ordering_key):
            sharing[f"ordering key {key}"].append(claim)
    for what, claims in sharing.items():
        claims.sort(key=lambda claim: claim.asked)
        for one, other in combinations(claims, 2):
            if other.asked >= one.answered and other.answered < one.surely_until:
                yield f"{what}: {other.job_id} ({other.attempt}) began while {one.job_id} ({one.attempt}) was live"


def limited(books: Books) -> dict[LimitKey, list[Held]]:
    """The claims of each limit key, by when they were answered."""
    found: dict[LimitKey, list[Held]] = defaultdict(list)
    for claim in sorted(books.claims.values(), key=lambda claim: claim.answered) if books.limited else ():
        if (key := demands.job_of(books.seed, claim.job_id).limit_key) is not None:
            found[key].append(claim)
    return found


def _beyond(key: LimitKey, claims: list[Held]) -> Iterator[str]:
    limit = demands.LIMITS[key.limit]
    for at, claim in enumerate(claims):
        # Those of one call start at once, the earlier ones first.
        live = [one for one in claims[:at] if one.began_before(claim) and claim.answered < one.surely_until]
        if limit.concurrency is not None and len(live) >= limit.concurrency:
            yield f"{key}: {claim.job_id} ({claim.attempt}) began while {len(live)} of its key were live"
        if limit.interval is not None and (count := _too_many(limit, claim, claims)):
            yield f"{key}: {count} began within a time that has no tokens for them, {claim.job_id} the first of them"


def _too_many(limit: Limit, first: Held, claims: list[Held]) -> int:
    """How many claims since this one are more than the bucket can have had tokens for; 0 if they never are."""
    assert limit.interval is not None
    since = [claim for claim in claims if claim.asked >= first.asked]
    for count, claim in enumerate(since, 1):
        seconds = claim.answered - first.asked + SLACK_SECONDS
        if count > limit.capacity + seconds / limit.interval.total_seconds():
            return count
    return 0


def _too_early(books: Books, by_job: Mapping[str, list[Held]]) -> Iterator[str]:
    """Jobs that were claimed before one that they follow can have ended, which only a settlement ends."""
    for job_id, claims in list(by_job.items()) if books.followed else []:
        for other in demands.follows(books.seed, job_id)[0]:
            settled = demands.kind_of(books.seed, other) in (Kind.PLAIN, Kind.FLAKY, Kind.DROPPED)
            if not settled or demands.may_give_up(books.seed, other) or other not in books.intended:
                continue
            asked = (claim.settling for claim in by_job.get(other, ()) if claim.settling is not None)
            first = min(asked, default=float("inf"))
            once = not books.repeated & {job_id, other}
            if once and any(claim.answered < first - SLACK_SECONDS for claim in claims):
                yield f"{job_id}: claimed before {other} had ended, which it follows"


def _wrong_with(books: Books, job_id: str, claims: list[Held], ending: Ending) -> Iterator[str]:
    kind = demands.kind_of(books.seed, job_id)
    if ending.kind == NO_RECORD:
        forgotten = kind is Kind.DROPPED and any(claim.settling is not None for claim in claims)
        if job_id in books.acknowledged and not forgotten:
            yield "acknowledged and lost"
    elif ending.kind not in _ENDINGS[kind] and not _gave_up(books, job_id, ending):
        yield f"a {kind.value} job ended as {ending.kind}"
    if not books.may_have_lived_twice(job_id):
        yield from _wrong_attempts(books, job_id, claims, ending)
        yield from _wrong_enders(claims, ending)
    yield from _wrong_result(books, job_id, ending)
    yield from _wrong_times(books, job_id, claims)


def _gave_up(books: Books, job_id: str, ending: Ending) -> bool:
    return ending.kind == "DependencyFailed" and demands.may_give_up(books.seed, job_id)


def _wrong_attempts(books: Books, job_id: str, claims: list[Held], ending: Ending) -> Iterator[str]:
    attempts = [claim.attempt for claim in claims if not claim.released]
    if len(set(attempts)) < len(attempts):
        yield f"attempts were numbered {sorted(attempts)}"
    allowed = demands.job_of(books.seed, job_id).max_attempts
    counted = ending.status.attempt if ending.status else allowed
    if not max(attempts, default=0) <= counted <= allowed:
        yield f"attempts {sorted(attempts)} were claimed, {counted} counted, {allowed} allowed"


def _wrong_enders(claims: list[Held], ending: Ending) -> Iterator[str]:
    enders = [claim.attempt for claim in claims if claim.ended]
    if len(enders) > 1:
        yield f"attempts {enders} were each told that they ended the job"
    last = ending.status.attempt if ending.status and ending.kind == "completed" else None
    if last is not None and any(attempt != last for attempt in enders):
        yield f"attempts {enders} were told that they ended the job, and attempt {last} did"
    if last is not None and any(claim.attempt == last and claim.told and not claim.told & _HELD for claim in claims):
        yield f"attempt {last} was told that it lost the job, and ended it"


def _wrong_result(books: Books, job_id: str, ending: Ending) -> Iterator[str]:
    if ending.outcome is None or ending.outcome.kind is not OutcomeKind.COMPLETED or ending.status is None:
        return
    result = json.loads(ending.outcome.result or b"null")
    payload = demands.job_of(books.seed, job_id).payload
    if result != {"digest": demands.digest(payload), "attempt": ending.status.attempt}:
        yield f"its result is {result} after {ending.status.attempt} attempts"


def _wrong_times(books: Books, job_id: str, claims: list[Held]) -> Iterator[str]:
    due = books.intended[job_id] + demands.job_of(books.seed, job_id).delay.total_seconds() - SLACK_SECONDS
    if any(claim.answered < due for claim in claims):
        yield "claimed before its delay was over"
    cancelled = books.cancelled.get(job_id, float("inf"))
    if any(claim.asked > cancelled for claim in claims):
        yield "claimed after it was cancelled"
