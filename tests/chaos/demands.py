"""What each job demands: a function of the round's seed and the job's id, so that anybody can check it."""

from __future__ import annotations

import hashlib
import json
import random
from datetime import timedelta
from enum import StrEnum
from typing import Final

from workers import Limit, Retry, RetryPolicy, UnrecoverableError
from workers.crons import Cron, Missed
from workers.jobs import DROP, AfterFailure, NewJob
from workers.limits import LimitKey
from workers.worker.handlers import Job

BACKOFF: Final = RetryPolicy(initial=timedelta(milliseconds=20), maximum=timedelta(milliseconds=200))
MORTAL_ATTEMPTS: Final = 2
ENDLESS_ATTEMPTS: Final = 1_000_000
FOLLOWERS: Final = 0.2
"""How many of the jobs follow others."""
PACED: Final = 0.08
"""How many of the batches have a limit on their rate."""
LIMITS: Final = {"few": Limit(concurrency=2), "paced": Limit("20/s", burst=2)}
TICK_EVERY: Final = timedelta(seconds=1)


class Kind(StrEnum):
    """How a job is to end."""

    PLAIN = "plain"
    """Completed."""
    FLAKY = "flaky"
    """Completed, after some attempts that failed."""
    DOOMED = "doomed"
    """Failed, at once."""
    MORTAL = "mortal"
    """Completed, or failed because the workers of its two attempts died."""
    DROPPED = "dropped"
    """Completed, and forgotten in that step."""
    CANCELLED = "cancelled"
    """Its producer cancels it: however that race ends."""


_CHANCES: Final = {Kind.PLAIN: 55, Kind.FLAKY: 15, Kind.MORTAL: 8, Kind.DOOMED: 7, Kind.DROPPED: 8, Kind.CANCELLED: 7}
_TICK: Final = {"id": "tick", "kind": Kind.DROPPED, "failures": 0, "seconds": 0, "filler": ""}
CRONS: Final = {
    name: Cron(
        name=name,
        job="work",
        every=TICK_EVERY,
        missed=Missed.ALL,
        payload=json.dumps(_TICK).encode(),
        max_attempts=ENDLESS_ATTEMPTS,
        keep_completed=DROP,
    )
    for name in ("tick0", "tick1", "tick2", "tick3")
}


def cron_of(job_id: str) -> Cron | None:
    """What recurs, if the job is one of its ticks."""
    prefix, _, name = job_id.rpartition(":")[0].partition(":")
    return CRONS.get(name) if prefix == "cron" else None


def kind_of(seed: str, job_id: str) -> Kind:
    """How the job is to end."""
    if cron_of(job_id):
        return Kind.DROPPED
    return random.Random(f"{seed} {job_id}").choices([*_CHANCES], [*_CHANCES.values()])[0]


def follows(seed: str, job_id: str) -> tuple[tuple[str, ...], AfterFailure]:
    """The jobs of its batch that it follows, and what it is to do if one of them does not complete."""
    prefix, _, number = job_id.rpartition("-")
    chance = random.Random(f"{seed} {job_id} follows")
    before = int(number) if number.isdigit() else 0
    if not before or chance.random() > FOLLOWERS:
        return (), AfterFailure.FAIL
    others = tuple(f"{prefix}-{other}" for other in range(max(0, before - chance.randint(1, 4)), before))
    # Of a dropped job nobody knows later how it ended.
    never_fails = any(kind_of(seed, other) is Kind.DROPPED for other in others) or chance.random() < 0.5
    return others, AfterFailure.RUN if never_fails else AfterFailure.FAIL


def may_give_up(seed: str, job_id: str) -> bool:
    """Whether it may fail because of a job that it follows."""
    others, policy = follows(seed, job_id)
    return policy is AfterFailure.FAIL and any(
        kind_of(seed, other) in (Kind.DOOMED, Kind.MORTAL, Kind.CANCELLED) or may_give_up(seed, other)
        for other in others
    )


def job_of(seed: str, job_id: str) -> NewJob:
    """The job as every producer enqueues it, however often."""
    if cron := cron_of(job_id):
        return cron.job_called(job_id.rpartition(":")[2])
    kind = kind_of(seed, job_id)
    chance = random.Random(f"{seed} {job_id} details")
    held_by, key = _held_by(seed, job_id)
    payload = {
        "id": job_id,
        "kind": kind,
        "failures": chance.randint(1, 3) if kind is Kind.FLAKY else 0,
        # Some run longer than a lease and live by its renewals.
        "seconds": chance.choices([0, chance.uniform(0.005, 0.05), chance.uniform(0.2, 0.7)], [76, 16, 8])[0],
        "filler": "x" * chance.choice([0, 10, 1_000, 5_000]),
    }
    others, policy = follows(seed, job_id)
    return NewJob(
        id=job_id,
        name=chance.choice(["work", "other work"]),
        payload=json.dumps(payload).encode(),
        delay=timedelta(milliseconds=chance.choices([0, chance.randint(50, 800)], [85, 15])[0]),
        max_attempts=MORTAL_ATTEMPTS if kind is Kind.MORTAL else ENDLESS_ATTEMPTS,
        keep_completed=DROP if kind is Kind.DROPPED else timedelta(hours=1),
        priority=chance.choice([0, 0, 0, 5]),
        ordering_key=f"key {key}" if held_by == "ordered" else None,
        limit_key=LimitKey(held_by, f"{key % 3}") if held_by in LIMITS else None,
        fair_key=f"tenant {key % 3}" if held_by == "fair" else None,
        backoff=BACKOFF,
        after=others,
        after_failure=policy,
    )


def _held_by(seed: str, job_id: str) -> tuple[str | None, int]:
    """What may keep the job back, and the number of its key. A rate is that of a whole batch, so that its jobs jam."""
    batch = random.Random(f"{seed} {job_id.rpartition('-')[0]} pace")
    if batch.random() < PACED:
        return "paced", batch.randint(1, 40)
    chance = random.Random(f"{seed} {job_id} gate")
    return chance.choices(["ordered", "few", "fair", None], [10, 6, 10, 74])[0], chance.randint(1, 40)


def run(job: Job) -> dict[str, object]:
    """What a handler makes of the job: its result, or the exception that its kind wants."""
    assert isinstance(job.payload, dict)
    if job.payload["kind"] == Kind.DOOMED:
        raise UnrecoverableError("doomed")
    if job.attempt <= job.payload["failures"]:
        raise Retry("flaky")
    return {"digest": digest(json.dumps(job.payload).encode()), "attempt": job.attempt}


def digest(payload: bytes) -> str:
    """What the result must quote, to show that it was made of this payload."""
    return hashlib.sha256(payload).hexdigest()
