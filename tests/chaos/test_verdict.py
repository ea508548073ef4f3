"""Every rule of the verdict finds what it is there for, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final, TypeAlias

import pytest

from tests.chaos import demands
from tests.chaos.demands import Kind
from tests.chaos.verdict import Books, Ending, judge
from workers import JobState, JobStatus
from workers.jobs import ErrorInfo, JobOutcome, OutcomeKind
from workers.limits import LimitKey

SEED: Final = "verdict"
LEASE: Final = 0.5

Line: TypeAlias = dict[str, Any]


def job_id(
    kind: Kind = Kind.PLAIN,
    *,
    delayed: bool = False,
    key: str | None = None,
    limit_key: LimitKey | None = None,
    after: str = "",
) -> str:
    """The first such job of the seed, with no key unless one is asked for."""
    for number in count():
        name = f"job{number:04}-0"
        new = demands.job_of(SEED, name)
        if (
            name > after
            and demands.kind_of(SEED, name) is kind
            and bool(new.delay) is delayed
            and (new.ordering_key, new.limit_key) == (key, limit_key)
        ):
            return name
    raise AssertionError


def sent(name: str, at: float = 0, *, status: str = "queued", fresh: bool = True) -> list[Line]:
    return [
        {"what": "intended", "asked": at, "ids": [name]},
        {"what": "acknowledged", "ids": [name], "statuses": [status], "fresh": fresh},
    ]


def claimed(name: str, token: str, at: float, *, attempt: int = 1) -> Line:
    return {"what": "claimed", "asked": at, "answered": at + 0.01, "claims": [[name, token, attempt, LEASE]]}


def settled(token: str, at: float, status: str = "applied", *, ends: bool = True, released: bool = False) -> list[Line]:
    return [
        {"what": "settling", "asked": at, "tokens": [token], "released": [token] if released else []},
        {"what": "settled", "outcomes": [[token, ends, status, None]]},
    ]


def ending(name: str, attempt: int = 1, *, error: str | None = None, result: object = None) -> Ending:
    """The job completed with the result it demands, or another, or failed."""
    new = demands.job_of(SEED, name)
    state = JobState.FAILED if error else JobState.COMPLETED
    right = {"digest": demands.digest(new.payload), "attempt": attempt}
    return Ending(
        status=JobStatus(
            id=name,
            name=new.name,
            state=state,
            attempt=attempt,
            max_attempts=new.max_attempts,
            created_at=datetime.now(UTC),
        ),
        outcome=JobOutcome(kind=OutcomeKind.FAILED, error=ErrorInfo(type=error, message=""))
        if error
        else JobOutcome(kind=OutcomeKind.COMPLETED, result=json.dumps(result or right).encode()),
    )


def problems(lines: list[Line], endings: dict[str, Ending], **counts: int) -> list[str]:
    """What the verdict says, of a storage that counts what it has unless it is said otherwise."""
    books = Books(SEED)
    books.read(lines)
    books.expect_ticks({name: 1 for name in endings if demands.cron_of(name)})
    found = Counter(one.status.state for one in endings.values() if one.status)
    return judge(books, endings, {state: counts.get(state.value, found[state]) for state in JobState})


A: Final = job_id()
B: Final = job_id(key="key 1")
C: Final = job_id(key="key 1", after=B)
FEW: Final = LimitKey("few", "1")
E: Final = job_id(limit_key=FEW)
F: Final = job_id(limit_key=FEW, after=E)
G: Final = job_id(limit_key=FEW, after=F)
PACED: Final = LimitKey("paced", "1")
P: Final = job_id(limit_key=PACED)
Q: Final = job_id(limit_key=PACED, after=P)
R: Final = job_id(limit_key=PACED, after=Q)
TICK: Final = demands.CRONS["tick0"].job_called("1").id
LATE: Final = job_id(delayed=True)
MORTAL: Final = job_id(Kind.MORTAL)
DOOMED: Final = job_id(Kind.DOOMED)
DROPPED: Final = job_id(Kind.DROPPED)
CANCELLED: Final = job_id(Kind.CANCELLED)
FOLLOWER: Final = next(
    name
    for number in range(1, 1_000)
    if (name := f"job-{number}") and len(demands.follows(SEED, name)[0]) == 1 and not demands.may_give_up(SEED, name)
    and {demands.kind_of(SEED, each) for each in (name, *demands.follows(SEED, name)[0])} == {Kind.PLAIN}
    and not demands.job_of(SEED, name).delay
)  # fmt: skip
FIRST: Final = demands.follows(SEED, FOLLOWER)[0][0]
GONE: Final = Ending(status=None, outcome=None)
WAS_CANCELLED: Final = Ending(status=None, outcome=JobOutcome(kind=OutcomeKind.CANCELLED))
CANCEL: Final[Line] = {"what": "cancelled", "id": CANCELLED, "answer": "cancelled", "answered": 1, "fresh": True}

RIGHT: Final[dict[str, tuple[list[Line], dict[str, Ending]]]] = {
    "completed": ([*sent(A), claimed(A, "t", 1), *settled("t", 1.1)], {A: ending(A)}),
    "never acknowledged": (sent(A)[:1], {A: GONE}),
    "taken after the lease": (
        [*sent(A), claimed(A, "t", 1), claimed(A, "u", 1.6, attempt=2), *settled("u", 1.7)],
        {A: ending(A, 2)},
    ),
    "late settlement": (
        [*sent(A), claimed(A, "t", 1), claimed(A, "u", 1.6, attempt=2), *settled("u", 1.7), *settled("t", 9, "lost")],
        {A: ending(A, 2)},
    ),
    "settled past the lease": ([*sent(A), claimed(A, "t", 1), *settled("t", 9)], {A: ending(A)}),
    "reply lost": (
        [*sent(A), claimed(A, "t", 1), *settled("t", 1.1)[:1], *settled("t", 1.2, "already_applied")],
        {A: ending(A)},
    ),
    "retried": (
        [
            *(*sent(A), claimed(A, "t", 1), *settled("t", 1.1, ends=False)),
            *(claimed(A, "u", 1.15, attempt=2), *settled("u", 1.2)),
        ],
        {A: ending(A, 2)},
    ),
    "released": (
        [
            *(*sent(A), claimed(A, "t", 1), *settled("t", 1.1, ends=False, released=True)),
            *(claimed(A, "u", 1.15), *settled("u", 1.2)),
        ],
        {A: ending(A)},
    ),
    "dropped": ([*sent(DROPPED), claimed(DROPPED, "t", 1), *settled("t", 1.1)[:1]], {DROPPED: GONE}),
    "one key in turn": (
        [
            *(*sent(B), *sent(C), claimed(B, "t", 1), *settled("t", 1.1)),
            *(claimed(C, "u", 1.15), *settled("u", 1.2)),
        ],
        {B: ending(B), C: ending(C)},
    ),
    "as many at once as may be": (
        [
            *(*sent(E), *sent(F), *sent(G), claimed(E, "t", 1), claimed(F, "u", 1.1), *settled("t", 1.15)),
            *(claimed(G, "v", 1.2), *settled("u", 1.3), *settled("v", 1.3)),
        ],
        {E: ending(E), F: ending(F), G: ending(G)},
    ),
    "one instead of a lost one": (
        [*sent(E), *sent(F), *sent(G), *(claimed(*one) for one in ((E, "t", 1), (F, "u", 1.1), (G, "v", 1.6)))],
        {E: ending(E), F: ending(F), G: ending(G)},
    ),
    "at their pace": (
        [*sent(P), *sent(Q), *sent(R), *(claimed(*one) for one in ((P, "t", 1), (Q, "u", 1.001), (R, "v", 1.05)))],
        {P: ending(P), Q: ending(Q), R: ending(R)},
    ),
    "a tick": ([claimed(TICK, "t", 1), *settled("t", 1.1)], {TICK: GONE}),
    "a tick of a worker that died": (
        [claimed(TICK, "t", 1), claimed(TICK, "u", 1.6, attempt=2), *settled("u", 1.7)],
        {TICK: GONE},
    ),
    "workers died": (
        [*sent(MORTAL), claimed(MORTAL, "t", 1), claimed(MORTAL, "u", 2, attempt=2)],
        {MORTAL: ending(MORTAL, 2, error="StalledError")},
    ),
    "failed and sent again": (
        [*sent(DOOMED)[:1], claimed(DOOMED, "t", 1), *settled("t", 1.1), *sent(DOOMED, 2, fresh=False),
         claimed(DOOMED, "u", 3), *settled("u", 3.1)],
        {DOOMED: ending(DOOMED, error="UnrecoverableError")},
    ),
    "cancelled": ([*sent(CANCELLED), CANCEL], {CANCELLED: WAS_CANCELLED}),
    "one after the other": (
        [
            *(*sent(FIRST), *sent(FOLLOWER), claimed(FIRST, "t", 1), *settled("t", 1.1)),
            *(claimed(FOLLOWER, "u", 1.2), *settled("u", 1.3)),
        ],
        {FIRST: ending(FIRST), FOLLOWER: ending(FOLLOWER)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_complained_of(name: str) -> None:
    """A story that a correct storage can produce has no problems."""
    assert problems(*RIGHT[name]) == []


WRONG: Final[dict[str, tuple[str, list[Line], dict[str, Ending]]]] = {
    "before the one it follows": (
        f"{FOLLOWER}: claimed before {FIRST} had ended",
        [
            *(*sent(FIRST), *sent(FOLLOWER), claimed(FIRST, "t", 1), claimed(FOLLOWER, "u", 1.1), *settled("t", 1.3)),
            *settled("u", 1.4),
        ],
        {FIRST: ending(FIRST), FOLLOWER: ending(FOLLOWER)},
    ),
    "given up without a reason": (
        "a plain job ended as DependencyFailed",
        sent(A),
        {A: ending(A, error="DependencyFailed")},
    ),
    "lost": ("acknowledged and lost", sent(A), {A: GONE}),
    "dropped by nobody": ("acknowledged and lost", [*sent(DROPPED), claimed(DROPPED, "t", 1)], {DROPPED: GONE}),
    "another ending": ("a plain job ended as StalledError", sent(A), {A: ending(A, error="StalledError")}),
    "told it is there": ("told it is there", sent(A, status="duplicate"), {A: ending(A)}),
    "another's result": ("its result is", sent(A), {A: ending(A, result={"digest": "", "attempt": 1})}),
    "an old attempt's result": (
        "its result is",
        sent(A),
        {A: ending(A, 2, result={"digest": demands.digest(demands.job_of(SEED, A).payload), "attempt": 1})},
    ),
    "two live claims": (
        f"job {A}: {A} (2) began while {A} (1) was live",
        [*sent(A), claimed(A, "t", 1), claimed(A, "u", 1.2, attempt=2)],
        {A: ending(A, 2)},
    ),
    "renewed and taken": (
        "began while",
        [*sent(A), claimed(A, "t", 1), {"what": "renewed", "asked": 1.4, "tokens": ["t"]},
         claimed(A, "u", 1.6, attempt=2)],
        {A: ending(A, 2)},
    ),
    "taken before it settled": (
        "began while",
        [*sent(A), claimed(A, "t", 1), *settled("t", 3), claimed(A, "u", 2, attempt=2)],
        {A: ending(A, 2)},
    ),
    "two of one key": (
        "ordering key key 1: ",
        [*sent(B), *sent(C), claimed(B, "t", 1), claimed(C, "u", 1.2)],
        {B: ending(B), C: ending(C)},
    ),
    "too many at once": (
        "began while 2 of its key were live",
        [*sent(E), *sent(F), *sent(G), *(claimed(*one) for one in ((E, "t", 1), (F, "u", 1.1), (G, "v", 1.2)))],
        {E: ending(E), F: ending(F), G: ending(G)},
    ),
    "too many in one call": (
        "began while 2 of its key were live",
        [
            *(*sent(E), *sent(F), *sent(G)),
            {**claimed(E, "t", 1), "claims": [[one, f"of {one}", 1, LEASE] for one in (E, F, G)]},
        ],
        {E: ending(E), F: ending(F), G: ending(G)},
    ),
    "too many in a time": (
        "began within a time that has no tokens for them",
        [*sent(P), *sent(Q), *sent(R), *(claimed(*one) for one in ((P, "t", 1), (Q, "u", 1), (R, "v", 1.01)))],
        {P: ending(P), Q: ending(Q), R: ending(R)},
    ),
    "a tick that was never enqueued": ("acknowledged and lost", [], {TICK: GONE}),
    "a tick that was enqueued twice": (
        "attempts were numbered [1, 1]",
        [claimed(TICK, "t", 1), *settled("t", 1.1), claimed(TICK, "u", 1.2), *settled("u", 1.3)],
        {TICK: GONE},
    ),
    "a tick before its time": ("before its delay", [claimed(TICK, "t", 0.9), *settled("t", 1.1)], {TICK: GONE}),
    "of nobody": ("claimed, and nobody sent it", [claimed(TICK, "t", 1), *settled("t", 1.1)], {}),
    "one token twice": (
        "its token was handed out before",
        [*sent(A), claimed(A, "t", 1), claimed(A, "t", 2, attempt=2)],
        {A: ending(A, 2)},
    ),
    "ended twice": (
        "attempts [1, 2] were each told that they ended the job",
        [*sent(A), claimed(A, "t", 1), *settled("t", 1.1), claimed(A, "u", 2, attempt=2), *settled("u", 2.1)],
        {A: ending(A, 2)},
    ),
    "lost and ended": (
        "attempt 1 was told that it lost the job, and ended it",
        [*sent(A), claimed(A, "t", 1), *settled("t", 1.1, "lost")],
        {A: ending(A)},
    ),
    "not settled": (
        "could not be settled",
        [*sent(A), claimed(A, "t", 1), *settled("t", 1.1, "error")],
        {A: ending(A)},
    ),
    "one number twice": (
        "attempts were numbered [1, 1]",
        [*sent(A), claimed(A, "t", 1), claimed(A, "u", 2)],
        {A: ending(A)},
    ),
    "too many attempts": (
        "3 counted, 2 allowed",
        [*sent(MORTAL), claimed(MORTAL, "t", 1, attempt=3)],
        {MORTAL: ending(MORTAL, 3)},
    ),
    "attempts not counted": ("1 counted", [*sent(A), claimed(A, "t", 1, attempt=2)], {A: ending(A)}),
    "too early": ("before its delay", [*sent(LATE, 1), claimed(LATE, "t", 1)], {LATE: ending(LATE)}),
    "cancelled and run": (
        "claimed after it was cancelled",
        [*sent(CANCELLED), CANCEL, claimed(CANCELLED, "t", 2)],
        {CANCELLED: WAS_CANCELLED},
    ),
    "not there to be cancelled": (
        "not found when its producer cancelled it",
        [*sent(CANCELLED), {**CANCEL, "answer": "not_found"}],
        {CANCELLED: WAS_CANCELLED},
    ),
    "an error that is no outage": (
        "a worker met StorageError: no",
        [{"what": "trouble", "expected": False, "error": "StorageError: no"}],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    """A story that no correct storage can produce has a problem, and it is the one."""
    wanted, lines, endings = WRONG[name]
    assert any(wanted in problem for problem in problems(lines, endings)), problems(lines, endings)


@pytest.mark.parametrize("state", ["processing", "completed"])
def test_states_that_do_not_add_up(state: str) -> None:
    """A job that is counted and was never sent, or not counted, is a problem."""
    assert any(f"{state}," in problem for problem in problems(sent(A), {A: ending(A)}, **{state: 7}))
