"""The steps of a queue on PostgreSQL: values go into the functions of `steps.sql`, rows become values again.

Those that take one statement outside of any transaction ask for it (see `loop_step.py`); their names end in -ing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

from sqlalchemy import Row, text
from sqlalchemy.exc import DBAPIError

from workers.errors import LossReason
from workers.jobs import (
    UNCOUNTED_RETRIES,
    Cancelled,
    Claim,
    Completed,
    Continued,
    EnqueueResult,
    EnqueueStatus,
    Failed,
    JobState,
    NewJob,
    ProgressReport,
    Released,
    Renewal,
    Retention,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.metadata import encode_meta
from workers.storage.abilities import Exchange
from workers.storage.base import ANY_NAME
from workers.storage.sql.postgres import statements, stops
from workers.storage.sql.postgres.driver.loop_step import Asking, run_blocking
from workers.storage.sql.rows import (
    Transaction,
    claim_of,
    decode_token,
    duration,
    encode_backoff,
    encode_error,
    encode_retention,
    encode_text,
    public_state,
)
from workers.storage.sql.steps import dependents
from workers.storage.sql.steps.ends import fails, note_failures, outcomes_by_id, why_lost
from workers.storage.sql.steps.enqueue import decide
from workers.storage.unread import Unread

_RELEASE: Final = text(
    "SELECT s.place, s.outcome FROM (SELECT array_agg(seq) AS seqs, array_agg(token) AS tokens, array_agg(id) AS ids,"
    " array_agg('released'::text) AS kinds, array_agg(NULL::bigint) AS numbers, array_agg(NULL::text) AS texts,"
    " array_agg(NULL::bytea) AS results FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND token = CAST(:secret AS bytea)) j,"
    " LATERAL workers_settle(:queue, seqs, tokens, ids, kinds, numbers, numbers, texts, texts, results, texts, 0,"
    " false) s WHERE j.seqs IS NOT NULL"
)


class LostClaims:
    """The claims of this process that were not read, by queue; touched by all threads."""

    def __init__(self) -> None:
        self._by_queue: dict[int, Unread[bytes]] = {}

    def claiming(self, transaction: Transaction, secret: bytes) -> AbstractContextManager[None]:
        """Note a claim whose answer is not read in this context; its tokens have the secret in common."""
        return self._of(transaction).claiming(secret)

    def given_back(self, transaction: Transaction) -> Asking[None]:
        """Release what was claimed from the queue and not read."""
        unread = self._of(transaction)
        while (secret := unread.take()) is not None:
            with unread.claiming(secret):
                yield _RELEASE, {"queue": transaction.queue, "secret": secret}

    def _of(self, transaction: Transaction) -> Unread[bytes]:
        return self._by_queue.setdefault(transaction.queue, Unread(DBAPIError))


MAX_RESULT_BYTES: Final = 200_000_000
"""PostgreSQL takes 1 GB in one message, and a result may be written in hexadecimal there."""

_WORKER_NOTED: Final = 1_000
"""Milliseconds after which a step writes down again that its worker was seen."""


def enqueue(transaction: Transaction, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
    """See `Storage.enqueue`; one statement, unless there are deduplication keys, or jobs to follow."""
    dependents.refuse_unknown(transaction, jobs)
    return add(transaction, jobs)


def add(transaction: Transaction, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
    """Enqueue jobs; those that nobody knows whom they are to follow count as gone."""
    if all(job.deduplication is None and not job.follows for job in jobs):
        return _insert(transaction, jobs)
    decision = decide(transaction, jobs)
    told = {answer.id: answer for answer in _insert(transaction, decision.new)}
    inserted = {answer.id for answer in told.values() if answer.status is EnqueueStatus.QUEUED}
    dependents.insert(transaction, [job for job in decision.new if job.id in inserted])
    decision.keys.write(inserted)
    return [told[answer.id] if answer.status is EnqueueStatus.QUEUED else answer for answer in decision.results]


def _insert(transaction: Transaction, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
    return run_blocking(transaction, inserting(transaction, jobs))


def inserting(transaction: Transaction, jobs: Sequence[NewJob]) -> Asking[list[EnqueueResult]]:
    """Insert each job, or report what has its id; for jobs without deduplication keys that follow none."""
    new: dict[str, NewJob] = {}
    for job in jobs:
        new.setdefault(encode_text(job.id), job)
    if not new:
        return []
    if len(jobs) == 1:
        one = _enqueue_one_values(transaction, jobs[0])
        if (yield statements.ENQUEUE_ONE, one).scalar_one():
            return [EnqueueResult(id=jobs[0].id, status=EnqueueStatus.QUEUED)]
    rows = yield statements.ENQUEUE, _enqueue_values(transaction, list(new.values()))
    existing = {row.id: row for row in rows}
    results = []
    told: set[str] = set()
    for job in jobs:
        row = existing.get(encode_text(job.id))
        if row is not None:
            state = public_state(row.state, row.run_at, row.now)
            done = state is JobState.COMPLETED
            status = EnqueueStatus.COMPLETED if done else EnqueueStatus.DUPLICATE
            results.append(EnqueueResult(id=job.id, status=status, existing_state=state, result=row.result))
        elif job.id not in told:
            results.append(EnqueueResult(id=job.id, status=EnqueueStatus.QUEUED))
            told.add(job.id)
        else:
            state = JobState.SCHEDULED if new[encode_text(job.id)].delay else JobState.QUEUED
            results.append(EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=state))
    return results


def _enqueue_values(transaction: Transaction, jobs: Sequence[NewJob]) -> dict[str, object]:
    columns = map(list, zip(*map(_job_values, jobs), strict=True))
    return {**dict(zip(statements.JOBS, columns, strict=True)), **_announced(transaction)}


def _enqueue_one_values(transaction: Transaction, job: NewJob) -> dict[str, object]:
    return {**dict(zip(statements.JOBS, _job_values(job), strict=True)), **_announced(transaction)}


def _job_values(job: NewJob) -> tuple[object, ...]:
    """Return what `statements.JOBS` names, of one job."""
    return (
        encode_text(job.id),
        encode_text(job.name),
        duration(job.delay),
        job.priority,
        job.max_attempts,
        encode_retention(job.keep_completed),
        encode_retention(job.keep_failed),
        None if job.holding_key is None else encode_text(job.holding_key),
        encode_backoff(job.backoff),
        job.payload,
        job.chain_index,
        encode_meta(job.meta) if job.meta else None,
    )


def _announced(transaction: Transaction) -> dict[str, object]:
    return {"queue": transaction.queue, "sure": transaction.lasting, "wake": not transaction.quiet}


def claiming(
    transaction: Transaction, worker_id: str, leases: Mapping[str, timedelta], limit: int, lost: LostClaims
) -> Asking[list[Claim]]:
    """See `Storage.claim`."""
    yield from lost.given_back(transaction)
    values = _claim_values(transaction, worker_id, leases, limit)
    with lost.claiming(transaction, values["secret"]):
        rows = yield statements.CLAIM, values
    return _claims(transaction, rows, values["secret"], worker_id, leases)


def exchanging(
    transaction: Transaction,
    settlements: Sequence[Settlement],
    worker_id: str,
    leases: Mapping[str, timedelta],
    limit: int,
    lost: LostClaims,
) -> Asking[Exchange]:
    """See `ExchangesJobs.settle_and_claim`; of settlements of one statement. Nothing is claimed where limits are."""
    first, outcomes = _distinct(settlements)
    chosen = list(first.values())
    if not chosen:
        return Exchange(outcomes=[outcomes[settlement.claim.token] for settlement in settlements])
    yield from lost.given_back(transaction)
    claiming = _claim_values(transaction, worker_id, leases, limit)
    values = {**_settle_values(transaction, chosen), **claiming}
    following = {place: job for place, job in enumerate(map(follower, chosen), 1) if job is not None}
    if following:
        jobs = _enqueue_values(transaction, list(following.values()))
        values |= {"next_places": list(following), "wake": jobs["wake"]}
        values |= {f"next_{name}": jobs[name] for name in statements.JOBS}
    with lost.claiming(transaction, claiming["secret"]):
        rows = (yield statements.FOLLOWED_EXCHANGE if following else statements.EXCHANGE, values).all()
    for told in filter(None, (rows[0].outcomes or "").split(",")):
        place, _, outcome = told.partition(" ")
        outcomes[chosen[int(place) - 1].claim.token] = SettleOutcome(status=SettleStatus(outcome))
    brought = [row for row in rows if row.seq is not None]
    claims = _claims(transaction, brought, claiming["secret"], worker_id, leases)
    if unknown := _unknown(chosen, outcomes):
        try:
            outcomes |= yield partial(outcomes_by_id, claims=unknown)
        except Exception:  # the settlements are repeated, and nobody would get the claims
            yield partial(settle, settlements=[Released(claim=claim) for claim in claims])
            raise
    told_apart = [_outcome(settlement, first, outcomes[settlement.claim.token]) for settlement in settlements]
    return Exchange(outcomes=told_apart, claims=None if rows[0].limited else claims)


def _claim_values(
    transaction: Transaction, worker_id: str, leases: Mapping[str, timedelta], limit: int
) -> dict[str, Any]:  # of any types that columns have
    named = {name: lease for name, lease in leases.items() if name != ANY_NAME}
    rest = leases.get(ANY_NAME)
    return {
        "queue": transaction.queue,
        "worker": encode_text(worker_id),
        "names": [encode_text(name) for name in named],
        "leases": [duration(lease) for lease in named.values()],
        "any": None if rest is None else duration(rest),
        "limit": min(limit, 100_000) if leases else 0,
        "secret": os.urandom(16),
        "noted": _WORKER_NOTED,
    }


def _claims(
    transaction: Transaction,
    rows: Iterable[Row[Any]],  # of any types that columns have
    secret: bytes,
    worker_id: str,
    leases: Mapping[str, timedelta],
) -> list[Claim]:
    claims = []
    for row in sorted(rows, key=lambda row: int(row.place)):
        job_id, name = transaction.decode(row.id), transaction.decode(row.name)
        lease = leases[name] if name in leases else leases[ANY_NAME]
        claims.append(claim_of(row, job_id=job_id, name=name, secret=secret, worker_id=worker_id, lease=lease))
    return claims


def looking(transaction: Transaction, names: Collection[str]) -> Asking[timedelta | None]:
    """Return how long until a claim for `names` may succeed, 0 for now; None while there is nothing to wait for."""
    values = {
        "queue": transaction.queue,
        "names": [encode_text(name) for name in names],
        "any": ANY_NAME in names,
    }
    due = (yield statements.CLAIMABLE_IN, values).scalar_one()
    return None if due is None else timedelta(milliseconds=due)


def renewing(transaction: Transaction, claims: Sequence[Claim]) -> Asking[Renewal]:
    """See `Storage.renew`."""
    tokens = [decode_token(claim.token) for claim in claims]
    values = {
        "queue": transaction.queue,
        "seqs": [seq for seq, _ in tokens],
        "tokens": [secret for _, secret in tokens],
        "ids": [encode_text(claim.job_id) for claim in claims],
        "leases": [duration(claim.lease) for claim in claims],
        "workers": [encode_text(claim.worker_id) for claim in claims],
        "noted": _WORKER_NOTED,
    }
    rows = yield statements.RENEW, values
    held = {claims[row.place - 1].token: row for row in rows}
    lost = [claim for claim in claims if claim.token not in held]
    reasons = (yield partial(why_lost, ids=[claim.job_id for claim in lost])) if lost else {}
    return Renewal(
        lost={claim.token: reasons[claim.job_id] for claim in lost},
        cancel_requested=frozenset(token for token, row in held.items() if row.cancel_requested),
    )


def reporting(transaction: Transaction, reports: Sequence[ProgressReport]) -> Asking[None]:
    """See `Storage.progress`."""
    latest = {report.claim.token: report for report in reports}.values()
    tokens = [decode_token(report.claim.token) for report in latest]
    values = {
        "queue": transaction.queue,
        "seqs": [seq for seq, _ in tokens],
        "tokens": [secret for _, secret in tokens],
        "ids": [encode_text(report.claim.job_id) for report in latest],
        "reported": [report.value for report in latest],
    }
    yield statements.PROGRESS, values


def settling(transaction: Transaction, settlements: Sequence[Settlement]) -> Asking[list[SettleOutcome]]:
    """See `Storage.settle`; of settlements that take one statement."""
    first, outcomes = _distinct(settlements)
    chosen = list(first.values())
    if chosen:
        rows = yield statements.SETTLE, _settle_values(transaction, chosen)
        outcomes |= _ended(chosen, rows)
    if unknown := _unknown(chosen, outcomes):
        outcomes |= yield partial(outcomes_by_id, claims=unknown)
    return [_outcome(settlement, first, outcomes[settlement.claim.token]) for settlement in settlements]


def settle(transaction: Transaction, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
    """See `Storage.settle`; continuations are enqueued in the same transaction."""
    first, outcomes = _distinct(settlements)
    chosen = list(first.values())
    if any(map(fails, chosen)):
        stops.lock(transaction, chosen)
        note_failures(transaction, chosen)
    outcomes |= _end(transaction, chosen)
    applied = [s for s in chosen if _status(outcomes.get(s.claim.token)) is SettleStatus.APPLIED]
    dependents.insert(transaction, [one.then for one in applied if isinstance(one, Continued)])
    add(transaction, [job for job in map(follower, applied) if job is not None])
    if unknown := _unknown(chosen, outcomes):
        outcomes |= outcomes_by_id(transaction, unknown)
    return [_outcome(settlement, first, outcomes[settlement.claim.token]) for settlement in settlements]


def _distinct(settlements: Sequence[Settlement]) -> tuple[dict[str, Settlement], dict[str, SettleOutcome]]:
    """Return the first settlement of each claim, and the outcomes of those that cannot be stored, by token."""
    first: dict[str, Settlement] = {}
    outcomes: dict[str, SettleOutcome] = {}
    for settlement in settlements:
        token = settlement.claim.token
        if isinstance(settlement, Completed) and len(settlement.result) > MAX_RESULT_BYTES:
            outcomes[token] = _too_large(settlement)
        elif token not in outcomes:
            first.setdefault(token, settlement)
    return first, outcomes


def _unknown(chosen: Sequence[Settlement], outcomes: Mapping[str, SettleOutcome]) -> list[Claim]:
    """Return the claims that do not hold their jobs."""
    return [settlement.claim for settlement in chosen if settlement.claim.token not in outcomes]


def _end(transaction: Transaction, chosen: Sequence[Settlement]) -> dict[str, SettleOutcome]:
    """End the attempts whose claim holds its job, and return their outcomes by token."""
    outcomes: dict[str, SettleOutcome] = {}
    stopped = [settlement for settlement in chosen if isinstance(settlement, Cancelled)]
    others = [settlement for settlement in chosen if not isinstance(settlement, Cancelled)]
    if stopped:
        stops.lock(transaction, chosen)
        outcomes |= stops.stop(transaction, stopped)
    if others:
        outcomes |= _ended(
            others, transaction.connection.execute(statements.SETTLE, _settle_values(transaction, others))
        )
    return outcomes


def _ended(chosen: Sequence[Settlement], rows: Iterable[Row[Any]]) -> dict[str, SettleOutcome]:  # of any columns
    return {chosen[row.place - 1].claim.token: SettleOutcome(status=SettleStatus(row.outcome)) for row in rows}


def _status(outcome: SettleOutcome | None) -> SettleStatus | None:
    return None if outcome is None else outcome.status


def _outcome(settlement: Settlement, first: Mapping[str, Settlement], outcome: SettleOutcome) -> SettleOutcome:
    earlier = first.get(settlement.claim.token)
    if outcome.status is not SettleStatus.APPLIED or earlier is None or earlier is settlement:
        return outcome
    if not isinstance(earlier, Continued) and _kept(earlier) is None:  # settled by it, and gone
        return SettleOutcome(status=SettleStatus.LOST, reason=LossReason.NOT_FOUND)
    return SettleOutcome(status=SettleStatus.ALREADY_APPLIED)


def _too_large(settlement: Completed) -> SettleOutcome:
    size = len(settlement.result)
    return SettleOutcome(
        status=SettleStatus.ERROR,
        detail=f"the result has {size} bytes; a PostgreSQL queue holds {MAX_RESULT_BYTES} at most",
    )


def _settle_values(transaction: Transaction, settlements: Sequence[Settlement]) -> dict[str, object]:
    tokens = [decode_token(settlement.claim.token) for settlement in settlements]
    return {
        "queue": transaction.queue,
        "seqs": [seq for seq, _ in tokens],
        "tokens": [secret for _, secret in tokens],
        "ids": [encode_text(settlement.claim.job_id) for settlement in settlements],
        "kinds": [_kind(settlement) for settlement in settlements],
        "keeps": [_kept(settlement) for settlement in settlements],
        "delays": [_delay(settlement) for settlement in settlements],
        "errors": [_error(settlement) for settlement in settlements],
        "capped": [_capped(settlement) for settlement in settlements],
        "results": [stored(settlement) for settlement in settlements],
        "thens": [_then(s.then) if isinstance(s, Continued) else None for s in settlements],
        "uncounted": UNCOUNTED_RETRIES,
        "sure": transaction.lasting,
    }


def follower(settlement: Settlement) -> NewJob | None:
    """Return the job that is enqueued when the settlement is applied."""
    return settlement.then if isinstance(settlement, Completed) else None


def _kind(settlement: Settlement) -> str:
    match settlement:
        case Completed():
            return "completed"
        case Continued():
            return "continued"
        case Failed():
            return "failed"
        case Retried():
            return "postponed" if settlement.snoozed else "retried" if settlement.counted else "uncounted"
        case _:
            return "released"


def _delay(settlement: Settlement) -> int | None:
    match settlement:
        case Continued():
            return duration(settlement.then.delay)
        case Retried():
            return duration(settlement.delay)
        case _:
            return None


def stored(settlement: Settlement) -> bytes | None:
    """Return what replaces the payload."""
    match settlement:
        case Completed():
            return settlement.result
        case Continued():
            return settlement.then.payload
        case _:
            return None


def _then(job: NewJob) -> str:
    """Return what a continued job's row gets, except its delay and payload."""
    return json.dumps(
        {
            "name": encode_text(job.name),
            "priority": job.priority,
            "max_attempts": job.max_attempts,
            "keep_completed": encode_retention(job.keep_completed),
            "keep_failed": encode_retention(job.keep_failed),
            "key": None if job.holding_key is None else encode_text(job.holding_key),
            "backoff": encode_backoff(job.backoff),
            "chain_index": job.chain_index,
            "meta": encode_meta(job.meta) if job.meta else None,
        }
    )


def _kept(settlement: Settlement) -> int | None:
    """Return how long the record stays if this settlement ends the job; None: it is dropped."""
    claim = settlement.claim
    keep: Retention | None = settlement.keep if isinstance(settlement, Completed | Failed | Cancelled) else None
    if keep is None:
        keep = claim.keep_completed if isinstance(settlement, Completed) else claim.keep_failed
    return encode_retention(keep)


def _error(settlement: Settlement) -> str | None:
    if isinstance(settlement, Failed) or (isinstance(settlement, Retried) and not settlement.snoozed):
        return encode_error(settlement.error)
    return None


def _capped(settlement: Settlement) -> str | None:
    """Return the error of an uncounted retry that turns out to be the last attempt."""
    if not isinstance(settlement, Retried) or settlement.counted:
        return None
    return encode_error(replace(settlement.error, exhausted=True))
