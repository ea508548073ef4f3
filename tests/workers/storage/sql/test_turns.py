"""Settlements and the claims that travel with them, on PostgreSQL; on SQLite they are apart."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

import pytest
from sqlalchemy import Engine, text

from workers.errors import LossReason, StorageError, StorageUnavailable
from workers.gates import Limit
from workers.jobs import Claim, JobState, Settlement, SettleStatus
from workers.storage.abilities import Turn
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.faults import faulty
from workers.testing.steps import until

pytestmark = pytest.mark.parametrize("database", ["postgres"])

LEASES: Final = {"*": timedelta(seconds=30)}


async def take_turn(storage: SqlStorage, *settlements: Settlement, limit: int = 2) -> Turn:
    return await storage.settle_and_claim(settlements, "w", leases=LEASES, limit=limit)


def brought(turn: Turn) -> list[str]:
    assert turn.claims is not None
    return steps.ids(turn.claims)


async def held(storage: SqlStorage, *waiting: str) -> Claim:
    """A claim, with these jobs waiting behind it."""
    await steps.enqueue(storage, steps.job("first"))
    claim = await steps.claim_one(storage)
    await steps.enqueue(storage, *map(steps.job, waiting))
    return claim


async def test_a_turn_ends_jobs_and_brings_the_next_in_their_order(storage: SqlStorage) -> None:
    """It claims no more than was asked for, each once, with an attempt counted and a lease that can be renewed."""
    turn = await take_turn(storage, steps.completed(await held(storage, "a", "b", "c")))
    assert [outcome.status for outcome in turn.outcomes] == [SettleStatus.APPLIED]
    assert brought(turn) == ["a", "b"]
    assert turn.claims is not None
    assert [(claim.attempt, claim.worker_id, claim.lease) for claim in turn.claims] == [(1, "w", LEASES["*"])] * 2
    assert (await storage.renew(turn.claims)).lost == {}
    last = await take_turn(storage, *map(steps.completed, turn.claims))
    assert brought(last) == ["c"]
    assert (await storage.counts())[JobState.COMPLETED] == 3


async def test_a_turn_that_finds_nothing_says_so(storage: SqlStorage) -> None:
    assert brought(await take_turn(storage, steps.completed(await held(storage)))) == []


async def test_the_next_job_of_an_ordering_key_comes_with_the_end_of_the_one_before(storage: SqlStorage) -> None:
    """The claim sees what the settlement has done: the key is free, and its next job no longer held."""
    await steps.enqueue(storage, *(steps.job(name, ordering_key="k") for name in ("a", "b", "c")))
    claim = await steps.claim_one(storage)
    assert await steps.claim(storage, 5) == []
    assert brought(await take_turn(storage, steps.completed(claim), limit=5)) == ["b"]


async def test_each_settlement_has_an_outcome_of_its_own(storage: SqlStorage) -> None:
    """One that is lost, or was applied before, or is there twice, keeps neither its neighbours nor the claims."""
    claim = await held(storage, "a", "b", "c")
    [second] = await steps.claim(storage)
    await steps.apply(storage, steps.completed(claim))
    other = await steps.claim_one(storage)
    await storage.remove([second.job_id], running=True)
    turn = await take_turn(storage, *map(steps.completed, (claim, second, other, other)), limit=1)
    assert [outcome.status for outcome in turn.outcomes] == [
        SettleStatus.ALREADY_APPLIED,
        SettleStatus.LOST,
        SettleStatus.APPLIED,
        SettleStatus.ALREADY_APPLIED,
    ]
    assert turn.outcomes[1].reason is LossReason.NOT_FOUND
    assert brought(turn) == ["c"]


async def test_a_failure_is_stored_and_what_is_due_then_is_left_to_a_claim_or_comes_along(storage: SqlStorage) -> None:
    turn = await take_turn(storage, steps.retried(await held(storage)))
    assert turn.outcomes[0].status is SettleStatus.APPLIED
    [again] = turn.claims or await steps.claim(storage)
    assert (again.job_id, again.attempt) == ("first", 2)


async def test_nothing_is_claimed_from_a_paused_queue(storage: SqlStorage) -> None:
    """Jobs that run end all the same."""
    claim = await held(storage, "a")
    await storage.pause()
    turn = await take_turn(storage, steps.completed(claim))
    assert (turn.outcomes[0].status, list(turn.claims or ())) == (SettleStatus.APPLIED, [])
    await storage.resume()
    assert steps.ids(await steps.claim(storage)) == ["a"]


async def test_claims_of_a_limited_queue_never_wait_for_its_gate_with_the_locks_of_a_settlement(
    storage: SqlStorage,
) -> None:
    """Two that each wait for what the other has would end each other: the claim is left to a call of its own."""
    claim = await held(storage, "a")
    await storage.declare_limits({"*": Limit(concurrency=1)})
    turn = await take_turn(storage, steps.completed(claim))
    assert (turn.outcomes[0].status, turn.claims) == (SettleStatus.APPLIED, None)
    assert steps.ids(await steps.claim(storage)) == ["a"]


async def test_a_turn_that_is_cancelled_gives_back_what_it_claimed(storage: SqlStorage) -> None:
    """Its settlements count, and the jobs are claimable with no attempt counted."""
    claim = await held(storage, "a", "b")
    turn = asyncio.create_task(take_turn(storage, steps.completed(claim)))
    await asyncio.sleep(0)  # it has begun
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    again: list[Claim] = []
    while len(again) < 2:  # it is given back in the background
        again += await steps.claim(storage, 2)
    assert sorted((claim.job_id, claim.attempt) for claim in again) == [("a", 1), ("b", 1)]
    repeated = await steps.settle(storage, steps.completed(claim))
    assert repeated.status in (
        SettleStatus.APPLIED,
        SettleStatus.ALREADY_APPLIED,
    )  # it may not have begun in its thread


async def test_a_lost_answer_loses_no_job_and_ends_none_twice(storage: SqlStorage) -> None:
    """The settlement is repeated and was applied; the jobs claimed with it are back when their leases are over."""
    claim = await held(storage, "a")
    wrapped, faults = faulty(storage)
    faults.replies_lost["settle_and_claim"] = 1
    short = {"*": timedelta(milliseconds=50)}
    with pytest.raises(StorageUnavailable):
        await wrapped.settle_and_claim([steps.completed(claim)], "w", leases=short, limit=1)  # type: ignore[attr-defined]  # the wrapper has it
    assert (await steps.settle(storage, steps.completed(claim))).status is SettleStatus.ALREADY_APPLIED
    assert await steps.claim(storage) == []

    async def is_back() -> bool:
        return bool((await storage.recover(10)).requeued)

    await until(is_back)
    again = await steps.claim_one(storage)
    assert (again.job_id, again.attempt) == ("a", 2)


async def test_a_claim_that_fails_undoes_the_settlement_that_travels_with_it(
    storage: SqlStorage, outsider: Engine
) -> None:
    """Nothing half is stored: the settlement is repeated without a claim."""
    claim = await held(storage, "a")
    with outsider.connect() as hand:
        hand.execute(text("ALTER TABLE workers_seen RENAME TO workers_seen_once"))
        with pytest.raises(StorageError, match="expected tables"):
            await take_turn(storage, steps.completed(claim))
        hand.execute(text("ALTER TABLE workers_seen_once RENAME TO workers_seen"))
    assert (await steps.settle(storage, steps.completed(claim))).status is SettleStatus.APPLIED
    assert steps.ids(await steps.claim(storage)) == ["a"]
