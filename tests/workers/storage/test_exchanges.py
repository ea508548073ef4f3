"""Settlements and the claims that travel with them, on the storages on Redis and on PostgreSQL."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from tests.workers.storage.exchanging import LEASES, brought, exchange_on, held
from workers.errors import LossReason, NotReplicated, StorageUnavailable
from workers.jobs import JobState, SettleStatus
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.redis import RedisStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.faults import Faults, faulty
from workers.testing.steps import until

OnRedis = BullMQStorage | BullStorage | RedisStorage
Turning = OnRedis | SqlStorage
KINDS: Final = {"bullmq": BullMQStorage, "bull": BullStorage, "redis": RedisStorage}
ONLY_ON_REDIS: Final = pytest.mark.parametrize("storage", KINDS, indirect=True)


@pytest.fixture(params=[*KINDS, "postgres"])
async def storage(request: pytest.FixtureRequest) -> AsyncIterator[Turning]:
    name = f"test-{uuid.uuid4().hex}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        await SqlStorage(url).migrate()
        opened: Turning = SqlStorage(url, name)
    else:
        opened = KINDS[request.param](request.getfixturevalue("redis_url"), name)
    await opened.connect()
    yield opened
    await opened.disconnect()


async def test_a_turn_ends_jobs_and_brings_the_next_in_their_order(storage: Turning) -> None:
    """It claims no more than was asked for, each once, with an attempt counted and a lease that can be renewed."""
    turn = await exchange_on(storage, steps.completed(await held(storage, "a", "b", "c")))
    assert [outcome.status for outcome in turn.outcomes] == [SettleStatus.APPLIED]
    assert brought(turn) == ["a", "b"]
    assert turn.claims is not None
    assert [(claim.attempt, claim.worker_id, claim.lease) for claim in turn.claims] == [(1, "w", LEASES["*"])] * 2
    assert (await storage.renew(turn.claims)).lost == {}
    last = await exchange_on(storage, *map(steps.completed, turn.claims))
    assert brought(last) == ["c"]
    assert (await storage.counts())[JobState.COMPLETED] == 3


async def test_a_turn_that_finds_nothing_says_so(storage: Turning) -> None:
    """An empty answer means that there is nothing to claim; a retried job is there at once."""
    claim = await held(storage)
    turn = await exchange_on(storage, steps.retried(claim))
    [again] = turn.claims or await steps.claim(storage)  # on BullMQ what is due only now is left to a claim
    assert (again.job_id, again.attempt) == ("first", 2)
    assert brought(await exchange_on(storage, steps.completed(again))) == []


async def test_each_settlement_has_an_outcome_of_its_own(storage: Turning) -> None:
    """One that is lost, or was applied before, or is there twice, keeps neither its neighbours nor the claims."""
    claim = await held(storage, "a", "b", "c")
    [second] = await steps.claim(storage)
    await steps.apply(storage, steps.completed(claim))
    other = await steps.claim_one(storage)
    await storage.remove([second.job_id], running=True)
    turn = await exchange_on(storage, *map(steps.completed, (claim, second, other, other)), limit=1)
    assert [outcome.status for outcome in turn.outcomes] == [
        SettleStatus.ALREADY_APPLIED,
        SettleStatus.LOST,
        SettleStatus.APPLIED,
        SettleStatus.ALREADY_APPLIED,
    ]
    assert turn.outcomes[1].reason is LossReason.NOT_FOUND
    assert brought(turn) == ["c"]


async def test_nothing_is_claimed_from_a_paused_queue(storage: Turning) -> None:
    """Jobs that run end all the same."""
    claim = await held(storage, "a")
    await storage.pause()
    turn = await exchange_on(storage, steps.completed(claim))
    assert (turn.outcomes[0].status, list(turn.claims or ())) == (SettleStatus.APPLIED, [])
    await storage.resume()
    assert steps.ids(await steps.claim(storage)) == ["a"]


@ONLY_ON_REDIS
async def test_a_turn_that_is_cancelled_gives_back_what_it_claimed(storage: OnRedis) -> None:
    """Its settlements count, and the jobs are claimable with no attempt counted."""
    claim = await held(storage, "a", "b")
    turn = asyncio.create_task(exchange_on(storage, steps.completed(claim)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it has begun
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert (await steps.status(storage, "first")).state is JobState.COMPLETED
    again = await steps.claim(storage, 2)
    assert sorted((claim.job_id, claim.attempt) for claim in again) == [("a", 1), ("b", 1)]


async def test_a_lost_answer_loses_no_job_and_ends_none_twice(storage: Turning) -> None:
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


@ONLY_ON_REDIS
async def test_scripts_that_the_server_lost_are_loaded_again(storage: OnRedis, redis_url: str) -> None:
    """Nothing runs twice for it."""
    claim = await held(storage, "a", "b")
    async with Redis.from_url(redis_url) as admin:
        await admin.script_flush()
    assert brought(await exchange_on(storage, steps.completed(claim))) == ["a", "b"]
    assert await steps.claim(storage) == []


@ONLY_ON_REDIS
async def test_what_is_to_be_confirmed_by_replicas_travels_alone(storage: OnRedis, redis_url: str) -> None:
    """A claim is not lost because too few replicas have confirmed a settlement."""
    claim = await held(storage, "a")
    wanting = f"{redis_url}?wait_replicas=1&wait_timeout_ms=1"
    confirmed = type(storage)(wanting, storage.queue)
    await confirmed.connect()
    try:
        with pytest.raises(NotReplicated):  # there is no replica
            await exchange_on(confirmed, steps.completed(claim))
    finally:
        await confirmed.disconnect()
    assert (await steps.claim_one(storage)).job_id == "a"


def test_faults_are_planned_for_turns_as_well() -> None:
    """A wrapper for tests treats them as any verb of the contract."""
    storage, faults = faulty(RedisStorage("redis://127.0.0.1:1"), Faults())
    assert hasattr(storage, "settle_and_claim")
    assert faults.next("settle_and_claim") is None


async def out_of_the_ordinary(storage: BullMQStorage, client: Any, kind: str) -> None:
    base = f"bull:{storage.queue}:"
    match kind:
        case "concurrency":
            await client.hset(f"{base}meta", "concurrency", 5)
        case "rate":
            await client.hset(f"{base}meta", mapping={"max": 5, "duration": 1000})
        case "due":
            await client.zadd(f"{base}delayed", {"a": 0x1000})
        case "foreign":
            await client.rpush(f"{base}wait", "completed")
        case "counter":
            await client.hset(f"{base}a", "ats", "x")
        case "marker":
            await client.set(f"{base}marker", "x")


@pytest.mark.parametrize("kind", ["concurrency", "rate", "due", "foreign", "counter", "marker"])
async def test_what_is_out_of_the_ordinary_on_bullmq_is_left_to_a_claim(redis_url: str, kind: str) -> None:
    """Jobs end, and nothing is claimed before somebody has looked: limits, jobs that are due, jobs that are damaged."""
    storage = BullMQStorage(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    try:
        claim = await held(storage, "a")
        async with Redis.from_url(redis_url) as client:
            await out_of_the_ordinary(storage, client, kind)
            turn = await exchange_on(storage, steps.completed(claim))
            assert (turn.outcomes[0].status, turn.claims) == (SettleStatus.APPLIED, None)
            assert await client.llen(f"bull:{storage.queue}:active") == 0
            assert await client.hget(f"bull:{storage.queue}:a", "ats") in (None, b"x")
    finally:
        await storage.disconnect()
