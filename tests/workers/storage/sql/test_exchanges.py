"""What is PostgreSQL's own of exchanges; on SQLite ends and claims are apart."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from tests.workers.storage.exchanging import brought, exchange_on, held
from tests.workers.storage.sql.steps import carried_out, claimed_when_back
from workers.errors import StorageError
from workers.jobs import Claim, Completed, JobState, NewJob, SettleStatus
from workers.limits import Limit
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.steps import until

pytestmark = pytest.mark.parametrize("database", ["postgres"])


async def test_the_next_job_of_an_ordering_key_comes_with_the_end_of_the_one_before(storage: SqlStorage) -> None:
    """The claim sees what the settlement has done: the key is free, and its next job no longer held."""
    await steps.enqueue(storage, *(steps.job(name, ordering_key="k") for name in ("a", "b", "c")))
    claim = await steps.claim_one(storage)
    assert await steps.claim(storage, 5) == []
    assert brought(await exchange_on(storage, steps.completed(claim), limit=5)) == ["b"]


async def test_claims_of_a_limited_queue_never_wait_for_its_gate_with_the_locks_of_a_settlement(
    storage: SqlStorage,
) -> None:
    """Two that each wait for what the other has would end each other: the claim is left to a call of its own."""
    claim = await held(storage, "a")
    await storage.declare_limits({"*": Limit(concurrency=1)})
    turn = await exchange_on(storage, steps.completed(claim))
    assert (turn.outcomes[0].status, turn.claims) == (SettleStatus.APPLIED, None)
    assert steps.ids(await steps.claim(storage)) == ["a"]


async def test_a_turn_that_is_cancelled_gives_back_what_it_claimed(
    storage: SqlStorage, sync_engine: Engine, outsider: Engine
) -> None:
    """Its settlements count, and the jobs are claimable with no attempt counted."""
    claim = await held(storage, "a", "b")

    def is_under_way() -> bool:
        with outsider.connect() as hand:
            return bool(hand.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one())

    with sync_engine.connect() as holder:
        holder.execute(text("SELECT FROM workers_jobs WHERE state = 'processing' FOR UPDATE"))
        turn = asyncio.create_task(exchange_on(storage, steps.completed(claim)))
        await until(is_under_way)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
    again = await claimed_when_back(storage, 2)
    assert sorted((claim.job_id, claim.attempt) for claim in again) == [("a", 1), ("b", 1)]
    assert (await steps.settle(storage, steps.completed(claim))).status is SettleStatus.ALREADY_APPLIED


async def test_a_claim_that_fails_undoes_the_settlement_that_travels_with_it(
    storage: SqlStorage, outsider: Engine
) -> None:
    """Nothing half is stored: the settlement is repeated without a claim."""
    claim = await held(storage, "a")
    with outsider.connect() as hand:
        hand.execute(text("ALTER TABLE workers_seen RENAME TO workers_seen_once"))
        with pytest.raises(StorageError, match="expected tables"):
            await exchange_on(storage, steps.completed(claim))
        hand.execute(text("ALTER TABLE workers_seen_once RENAME TO workers_seen"))
    assert (await steps.settle(storage, steps.completed(claim))).status is SettleStatus.APPLIED
    assert steps.ids(await steps.claim(storage)) == ["a"]


async def test_what_follows_an_end_is_enqueued_and_comes_in_the_same_statement(storage: SqlStorage) -> None:
    """Each of several jobs has its own, with all that belongs to it, and the claim sees them."""
    await steps.enqueue(storage, *map(steps.job, ("a", "b")))
    claims = await steps.claim(storage, 2)
    after = [
        steps.job("after-a", payload=b"\\x00'{},", priority=1, ordering_key="k", max_attempts=7),
        steps.job("after-b", delay=timedelta(hours=1)),
    ]
    statements: list[str] = []
    with carried_out(statements.append):
        turn = await exchange_on(storage, *map(followed_by, claims, after))
    assert len(statements) == 1
    assert [outcome.status for outcome in turn.outcomes] == [SettleStatus.APPLIED] * 2
    [came] = turn.claims or ()
    assert (came.job_id, came.payload, came.priority, came.max_attempts) == ("after-a", b"\\x00'{},", 1, 7)
    [delayed] = await storage.status(["after-b"])
    assert delayed is not None
    assert delayed.state is JobState.SCHEDULED


async def test_nothing_follows_what_was_not_ended(storage: SqlStorage) -> None:
    """Neither what was settled before nor what another worker has by now."""
    await steps.enqueue(storage, *map(steps.job, ("a", "b")))
    one, other = await steps.claim(storage, 2)
    await steps.settle(storage, steps.completed(one))
    settlements = map(followed_by, (one, other), map(steps.job, ("after-a", "after-b")))
    turn = await exchange_on(storage, *settlements)
    assert [outcome.status for outcome in turn.outcomes] == [SettleStatus.ALREADY_APPLIED, SettleStatus.APPLIED]
    assert brought(turn) == ["after-b"]
    assert await storage.status(["after-a"]) == [None]
    again = await exchange_on(storage, followed_by(other, steps.job("after-c")))
    assert (again.outcomes[0].status, again.claims) == (SettleStatus.ALREADY_APPLIED, [])
    assert await storage.status(["after-c"]) == [None]


def followed_by(claim: Claim, then: NewJob) -> Completed:
    return Completed(claim=claim, result=b"", then=then)
