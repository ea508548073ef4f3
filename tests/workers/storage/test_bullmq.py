"""What is special about the BullMQ storage; the promises every storage makes are in the conformance suite."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio import Redis

from tests.servers import ValkeyProcess, free_port, valkey
from workers import JobState, NewJob, StorageError, StorageUnavailable
from workers.errors import LossReason, Unsupported, WorkersError
from workers.jobs import (
    DROP,
    CancelResult,
    Claim,
    Completed,
    EnqueueStatus,
    ErrorInfo,
    Failed,
    JobEventKind,
    OutcomeKind,
    Released,
    Retried,
    Settlement,
    SettleStatus,
)
from workers.storage.base import Storage
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq_claims import code_outcome
from workers.storage.bullmq_lua import scripts
from workers.storage.bullmq_server import translate

LEASES = {"*": timedelta(seconds=30)}
ERROR = ErrorInfo(type="ValueError", message="no")
SHORT = timedelta(milliseconds=50)
PATIENCE = 10.0


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[ValkeyProcess]:
    """A server that the test may stop."""
    with valkey() as server:
        yield server


def job(job_id: str, **fields: Any) -> NewJob:
    return NewJob(**{"id": job_id, "name": "work", "payload": b"{}", **fields})


async def claim_one(storage: BullMQStorage, lease: timedelta = timedelta(seconds=30)) -> Claim:
    [claim] = await storage.claim("w", leases={"*": lease}, limit=1)
    return claim


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """The condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.005)


def test_it_is_a_storage(redis_url: str) -> None:
    """The type checker and `limits` agree on what this is."""
    storage: Storage = BullMQStorage(redis_url, "q")
    assert storage.queue == "q"
    assert (storage.limits.clock, storage.limits.recovery_passes) == ("client", 2)


# Targets


async def test_a_client_without_text_replies_is_refused(redis_url: str) -> None:
    """BullMQ's scripts answer text; the error says which setting is wrong."""
    async with Redis.from_url(redis_url) as bytes_client:
        with pytest.raises(StorageError, match="decode_responses=True"):
            BullMQStorage(bytes_client)


@pytest.mark.parametrize("target", ["http://example.org", "", "sqlite:///x", 7])
def test_other_targets_are_refused(target: Any) -> None:
    """What is no Redis is refused before anything is asked of it."""
    with pytest.raises(StorageError):
        BullMQStorage(target)


async def test_a_lent_client_stays_open(redis_url: str, client: Any) -> None:
    """The storage uses the client's settings and never its connections."""
    storage = BullMQStorage(client, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    await client.client_setname("lent")
    await storage.enqueue([job("a")])
    await storage.disconnect()
    assert await client.client_getname() == "lent"


async def test_both_forms_of_url(own_server: ValkeyProcess) -> None:
    """`bullmq+redis://` is the same server, and `?queue=` names the queue unless the argument does."""
    storage = BullMQStorage(f"bullmq+{own_server.url}?queue=named")
    assert storage.queue == "named"
    await storage.connect()
    await storage.enqueue([job("a")])
    await storage.disconnect()
    same = BullMQStorage(own_server.url, "named")
    await same.connect()
    assert (await claim_one(same)).job_id == "a"
    await same.disconnect()
    assert BullMQStorage(f"{own_server.url}?queue=named", "other").queue == "other"


async def test_a_password_is_never_shown(own_server: ValkeyProcess) -> None:
    """Neither the repr nor the error of a refused log-in has the URL's password."""
    storage = BullMQStorage(own_server.url.replace("//", "//user:hunter2@"))
    assert "hunter2" not in repr(storage)
    with pytest.raises(StorageError, match="refused the log-in") as caught:
        await storage.connect()
    assert "hunter2" not in str(caught.value)


async def test_verbs_need_a_connection(redis_url: str) -> None:
    """A verb before `connect` says what is missing."""
    with pytest.raises(StorageError, match="connect"):
        await BullMQStorage(redis_url).counts()


async def test_foreign_keys_are_reported(storage: BullMQStorage, client: Any) -> None:
    """Keys of another type in the queue's place are an error that retrying will not cure."""
    await client.set(f"bull:{storage.queue}:wait", "x")
    with pytest.raises(StorageError, match="WRONGTYPE"):
        await storage.claim("w", leases=LEASES, limit=1)
    with pytest.raises(StorageError):
        await storage.enqueue([job("a")])


# Settling: every code of the scripts, made by the state that causes it


async def _removed(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.delete(key, f"{key}:lock")


async def _recovered(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.delete(f"{key}:lock")
    passes = [await storage.recover(10) for _ in range(storage.limits.recovery_passes)]
    assert [recovery.requeued for recovery in passes] == [(), (key.rpartition(":")[2],)]


async def _taken(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.set(f"{key}:lock", "other")


async def _not_active(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.delete(f"bull:{storage.queue}:active")


async def _with_children(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.sadd(f"{key}:dependencies", "child")


async def _with_failed_children(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.zadd(f"{key}:unsuccessful", {"child": 1})


@pytest.mark.parametrize(
    ("prepare", "status", "reason"),
    [
        pytest.param(_removed, SettleStatus.LOST, LossReason.NOT_FOUND, id="-1 no job"),
        pytest.param(_recovered, SettleStatus.LOST, LossReason.TAKEN, id="-2 no lock"),
        pytest.param(_not_active, SettleStatus.LOST, LossReason.TAKEN, id="-3 not active"),
        pytest.param(_taken, SettleStatus.LOST, LossReason.TAKEN, id="-6 another's lock"),
        pytest.param(_with_children, SettleStatus.ERROR, None, id="-4 children"),
        pytest.param(_with_failed_children, SettleStatus.ERROR, None, id="-9 failed children"),
    ],
)
async def test_codes(
    storage: BullMQStorage,
    client: Any,
    prepare: Callable[[BullMQStorage, Any, str], Awaitable[None]],
    status: SettleStatus,
    reason: LossReason | None,
) -> None:
    """Each code of BullMQ's scripts becomes the outcome it means, and spares its neighbour."""
    await storage.enqueue([job("a"), job("b")])
    first, second = await storage.claim("w", leases=LEASES, limit=2)
    await prepare(storage, client, f"bull:{storage.queue}:{first.job_id}")
    outcomes = await storage.settle([Completed(claim=first, result=b"1"), Completed(claim=second, result=b"2")])
    assert (outcomes[0].status, outcomes[0].reason) == (status, reason)
    assert (outcomes[0].detail is None) == (status is SettleStatus.LOST)
    assert outcomes[1].status is (SettleStatus.LOST if prepare is _not_active else SettleStatus.APPLIED)


def test_an_unknown_code_is_an_error() -> None:
    """A code that a later package might bring is reported, not taken for success."""
    outcome = code_outcome(-99)
    assert outcome is not None
    assert outcome.status is SettleStatus.ERROR
    assert "-99" in (outcome.detail or "")


@pytest.mark.parametrize(
    "make",
    [
        lambda claim: Completed(claim=claim, result=b"1"),
        lambda claim: Failed(claim=claim, error=ERROR),
        lambda claim: Retried(claim=claim, delay=timedelta(hours=1), error=ERROR),
        lambda claim: Released(claim=claim),
    ],
)
async def test_an_expired_lock_still_settles(
    storage: BullMQStorage, client: Any, make: Callable[[Claim], Settlement]
) -> None:
    """BullMQ takes an expired lock as lost; as long as nobody recovered the job, its claim is good."""
    await storage.enqueue([job("a")])
    claim = await claim_one(storage)
    await client.delete(f"bull:{storage.queue}:a:lock")
    assert dict((await storage.renew([claim])).lost) == {}
    await client.delete(f"bull:{storage.queue}:a:lock")
    [first] = await storage.settle([make(claim)])
    [again] = await storage.settle([make(claim)])
    assert (first.status, again.status) == (SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED)


async def test_a_foreign_worker_that_took_the_job_is_not_overruled(storage: BullMQStorage, client: Any) -> None:
    """A worker that writes no name leaves our token in the record; its own expired lock does not give us the job."""
    await storage.enqueue([job("a", max_attempts=9)])
    claim = await claim_one(storage)
    key = f"bull:{storage.queue}:a"
    await _recovered(storage, client, key)
    other = await claim_one(storage)
    await client.hset(key, "pb", claim.token)
    await client.delete(f"{key}:lock")
    [outcome] = await storage.settle([Completed(claim=claim, result=b"1")])
    assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.TAKEN)
    assert other.attempt == 2


async def test_a_settlement_given_back_is_not_settled_twice(storage: BullMQStorage, client: Any) -> None:
    """After an uncounted retry a nameless worker ran the same attempt; the first claim, repeated, changes nothing."""
    await storage.enqueue([job("a")])
    claim = await claim_one(storage)
    again = Retried(claim=claim, delay=timedelta(0), error=ERROR, counted=False)
    await storage.settle([again])
    assert (await claim_one(storage)).attempt == claim.attempt
    key = f"bull:{storage.queue}:a"
    await client.hset(key, "pb", claim.token)
    await client.delete(f"{key}:lock")
    [outcome] = await storage.settle([again])
    assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.TAKEN)


async def test_another_storages_claim_is_refused(storage: BullMQStorage) -> None:
    """A claim that BullMQ did not make cannot be settled here."""
    await storage.enqueue([job("a")])
    claim = await claim_one(storage)
    fields = {name: getattr(claim, name) for name in Claim.__dataclass_fields__}
    with pytest.raises(StorageError, match="another storage"):
        await storage.settle([Released(claim=Claim(**fields))])


# Claiming what others wrote


async def test_a_job_without_a_record_can_be_got_rid_of(storage: BullMQStorage, client: Any) -> None:
    """An id in the list whose hash is gone is claimed without a name, and fails like any job."""
    await client.lpush(f"bull:{storage.queue}:wait", "ghost")
    claim = await claim_one(storage)
    assert (claim.job_id, claim.name, claim.payload, claim.max_attempts) == ("ghost", "", b"", 1)
    [outcome] = await storage.settle([Failed(claim=claim, error=ERROR)])
    assert outcome.status is SettleStatus.APPLIED


async def test_junk_in_a_record_is_survived(storage: BullMQStorage, client: Any) -> None:
    """Options and numbers that are none, and bytes that are no text, cost neither the job nor its neighbours."""
    raw = Redis.from_url(f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0")
    junk: dict[Any, Any] = {"name": b"\xff\xfe", "data": b"\x80{", "opts": "[[", "timestamp": "soon", "atm": "-1"}
    await raw.hset(f"bull:{storage.queue}:1", mapping=junk)
    await raw.aclose()
    await client.lpush(f"bull:{storage.queue}:wait", "1")
    await storage.enqueue([job("a")])
    bad, good = await storage.claim("w", leases=LEASES, limit=2)
    assert (bad.job_id, bad.payload, bad.attempt, bad.max_attempts) == ("1", b"\x80{", 1, 1)
    assert good.job_id == "a"
    outcomes = await storage.settle([Failed(claim=bad, error=ERROR), Completed(claim=good, result=b"1")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED] * 2


async def test_leases_by_name(storage: BullMQStorage, client: Any) -> None:
    """Jobs are locked before their names are known; each has its own lease in the end."""
    await storage.enqueue([job("a", name="short"), job("b", name="long")])
    leases = {"short": timedelta(seconds=5), "long": timedelta(seconds=60)}
    claims = await storage.claim("w", leases=leases, limit=2)
    assert [claim.lease for claim in claims] == [timedelta(seconds=5), timedelta(seconds=60)]
    left = [await client.pttl(f"bull:{storage.queue}:{name}:lock") for name in "ab"]
    assert 0 < left[0] <= 5_000 < left[1] <= 60_000


async def test_a_job_an_operator_retried_runs(storage: BullMQStorage, client: Any) -> None:
    """A dashboard puts a failed job back without resetting its attempts: one more run, not a stalled job."""
    await storage.enqueue([job("a", max_attempts=1)])
    await storage.settle([Failed(claim=await claim_one(storage), error=ERROR)])
    key = f"bull:{storage.queue}"
    await client.zrem(f"{key}:failed", "a")
    await client.hset(f"{key}:a", "stc", 1)
    await client.lpush(f"{key}:wait", "a")
    claim = await claim_one(storage)
    assert (claim.attempt, claim.stalled) == (3, None)


async def test_a_limit_by_count_is_kept(storage: BullMQStorage, client: Any) -> None:
    """`removeOnComplete: 1` of another producer keeps one record when we complete its jobs."""
    await storage.enqueue([job(name) for name in ("a", "b", "c")])
    for name in ("a", "b", "c"):
        await client.hset(f"bull:{storage.queue}:{name}", "opts", json.dumps({"removeOnComplete": 1}))
    for _ in range(3):
        await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    assert (await storage.counts())[JobState.COMPLETED] == 1


async def test_one_settlements_retention_spares_the_others(storage: BullMQStorage) -> None:
    """A record kept shorter than its queue's goes alone: not until the sweep, but then without the others."""
    await storage.enqueue([job("a"), job("b")])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1", keep=SHORT)])
    await until(lambda: _gone(storage, "b"))
    assert await storage.sweep(10) == 1
    assert (await storage.counts())[JobState.COMPLETED] == 1
    assert await storage.result("a") is not None


async def _gone(storage: BullMQStorage, job_id: str) -> bool:
    return await storage.status([job_id]) == [None]


async def test_a_continuation_that_cannot_be_spares_its_neighbours(storage: BullMQStorage) -> None:
    """A completion whose continuation BullMQ cannot keep is an error of its own; the rest of the batch is settled."""
    await storage.enqueue([job("a"), job("b")])
    first, second = await storage.claim("w", leases=LEASES, limit=2)
    outcomes = await storage.settle(
        [
            Completed(claim=first, result=b"1", then=job("next", ordering_key="k")),
            Completed(claim=second, result=b"2", then=job("other")),
        ]
    )
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]
    assert "ordering" in (outcomes[0].detail or "")
    states = [status and status.state for status in await storage.status(["a", "b", "next", "other"])]
    assert states == [JobState.PROCESSING, JobState.COMPLETED, None, JobState.QUEUED]


async def test_a_page_looks_at_a_bounded_number(storage: BullMQStorage, client: Any) -> None:
    """Jobs in another state that share a structure end a page early, with a cursor, and hide nothing."""
    await storage.enqueue([job("failing")])
    await storage.settle([Retried(claim=await claim_one(storage), delay=timedelta(hours=9), error=ERROR)])
    await storage.enqueue([job(f"job-{number}", delay=timedelta(hours=1)) for number in range(1_500)])
    first = await storage.list(JobState.FAILING, limit=1)
    assert (first.jobs, first.cursor is None) == ((), False)
    second = await storage.list(JobState.FAILING, cursor=first.cursor, limit=1)
    assert ([one.id for one in second.jobs], second.cursor) == (["failing"], None)


async def test_a_sweep_ends_with_jobs_it_may_not_touch(storage: BullMQStorage, client: Any) -> None:
    """Records without a hash or with a lock left behind go, and nothing keeps a sweep going round."""
    await storage.enqueue([job("a", keep_completed=timedelta(milliseconds=1))])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    await client.set(f"bull:{storage.queue}:a:lock", "left behind")
    await client.zadd(f"bull:{storage.queue}:failed", {"ghost": 1})
    await until(lambda: _gone(storage, "a"))
    assert await storage.sweep(1_000) == 2
    assert await storage.sweep(1_000) == 0
    assert set((await storage.counts()).values()) == {0}


async def test_a_number_is_found_under_either_id(storage: BullMQStorage, client: Any) -> None:
    """`7` of ours and `7` of BullMQ's counter are told apart in Redis; ours is looked for first."""
    await client.hset(f"bull:{storage.queue}:7", mapping={"name": "theirs", "data": "{}", "timestamp": 1})
    await client.lpush(f"bull:{storage.queue}:wait", "7")
    [theirs] = await storage.status(["7"])
    await storage.enqueue([job("7", name="ours")])
    [ours] = await storage.status(["7"])
    assert theirs is not None
    assert ours is not None
    assert (theirs.name, ours.name) == ("theirs", "ours")
    claims = await storage.claim("w", leases=LEASES, limit=2)
    assert [(claim.job_id, claim.name) for claim in claims] == [("7", "theirs"), ("7", "ours")]
    outcomes = await storage.settle([Completed(claim=claim, result=b"1") for claim in claims])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED] * 2


async def test_ordering_keys_and_ttl_updates_are_refused(storage: BullMQStorage) -> None:
    """What the limits declare away is refused, not ignored."""
    with pytest.raises(Unsupported, match="ordering"):
        await storage.enqueue([job("a", ordering_key="k")])
    with pytest.raises(Unsupported):
        await storage.update_result_ttl("a", timedelta(hours=1))


async def test_a_job_of_a_scheduler_is_not_cancelled(storage: BullMQStorage, client: Any) -> None:
    """Cancelling one run of a Node job scheduler would end the schedule; the error says what to do."""
    await storage.enqueue([job("a")])
    await client.hset(f"bull:{storage.queue}:a", "rjk", "every-minute")
    with pytest.raises(StorageError, match="scheduler"):
        await storage.cancel("a")
    assert await storage.remove(["a"]) == 0


# Waiting


async def test_a_cancelled_wait_hands_on_what_it_popped(storage: BullMQStorage, client: Any, redis_url: str) -> None:
    """A waiter cancelled while its wake-up is on the way wakes the next waiter instead."""
    waits = [asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60))) for _ in range(2)]
    await until(lambda: _all_blocked(client, 2))
    with redis.Redis.from_url(redis_url) as now:  # blocks this loop: nobody here has read the answer yet
        now.zadd(f"bull:{storage.queue}:marker", {"0": 0})
        assert not now.exists(f"bull:{storage.queue}:marker")
    woken = [wait for wait in waits if not wait.cancel()]
    assert woken == []
    await asyncio.gather(*waits, return_exceptions=True)
    assert await client.exists(f"bull:{storage.queue}:marker")


async def _all_blocked(client: Any, count: int) -> bool:
    clients = await client.client_list()
    return sum(one["cmd"] == "bzpopmin" and "b" in one["flags"] for one in clients) == count


async def test_cancelling_at_any_moment_wakes_the_next(storage: BullMQStorage) -> None:
    """Whenever a waiter is cancelled, a job that arrived wakes another at once."""
    for round_number in range(40):
        first = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
        await asyncio.sleep(0.0003 * (round_number % 10))
        added = asyncio.create_task(storage.enqueue([job(f"job-{round_number}")]))
        await asyncio.sleep(0.0002 * (round_number % 7))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await added
        async with asyncio.timeout(2):
            await storage.wait(("*",), timeout=timedelta(seconds=60))
        await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])


async def test_a_waiter_that_leaves_hands_on_the_due_time(storage: BullMQStorage) -> None:
    """The one waiter that popped the mark of a delayed job puts it back when it stops waiting."""
    first = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    second = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    await asyncio.sleep(0.05)
    await storage.enqueue([job("soon", delay=timedelta(milliseconds=300))])
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    async with asyncio.timeout(2):
        await second
    assert (await claim_one(storage)).job_id == "soon"


async def test_a_lost_marker_does_not_hide_a_job(storage: BullMQStorage, client: Any) -> None:
    """A waiter that was killed with the marker in its hand costs nobody a job: the next one looks for itself."""
    await storage.enqueue([job("a")])
    await client.delete(f"bull:{storage.queue}:marker")
    async with asyncio.timeout(2):
        await storage.wait(("*",), timeout=timedelta(seconds=60))


@pytest.mark.parametrize(
    "meta",
    [{"paused": "1"}, {"concurrency": "0"}, {"max": "1", "duration": "60000"}],
    ids=lambda meta: next(iter(meta)),
)
async def test_a_wait_for_what_may_not_run_does_not_spin(
    storage: BullMQStorage, client: Any, meta: dict[str, str]
) -> None:
    """Jobs behind a pause, a concurrency limit or a rate limit set in Node are no reason to wake."""
    key = f"bull:{storage.queue}"
    await storage.enqueue([job("a"), job("b")])
    await client.hset(f"{key}:meta", mapping=meta)
    await client.set(f"{key}:limiter", 1, px=60_000)
    await client.delete(f"{key}:marker")
    assert await storage.claim("w", leases=LEASES, limit=1) == []
    started = asyncio.get_running_loop().time()
    await storage.wait(("*",), timeout=timedelta(milliseconds=200))
    assert asyncio.get_running_loop().time() - started >= 0.2


async def test_an_idle_wait_asks_next_to_nothing(own_server: ValkeyProcess) -> None:
    """While nothing happens, a waiting worker sends no command."""
    storage = BullMQStorage(own_server.url)
    await storage.connect()
    waiting = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    async with Redis.from_url(own_server.url, decode_responses=True) as client:
        await until(lambda: _all_blocked(client, 1))
        before = (await client.info("stats"))["total_commands_processed"]
        await asyncio.sleep(0.5)
        assert (await client.info("stats"))["total_commands_processed"] - before == 1, "the first INFO itself"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await storage.disconnect()


# Servers that lose scripts, restart, die or hang


async def test_scripts_lost_by_the_server_are_loaded_again(own_server: ValkeyProcess) -> None:
    """After SCRIPT FLUSH every verb works on, and repeats nothing that had run."""
    storage = BullMQStorage(own_server.url)
    await storage.connect()
    client = Redis.from_url(own_server.url)

    async def flushed() -> BullMQStorage:
        await client.script_flush()
        return storage

    jobs = [job("a"), job("b", priority=1), job("c", delay=timedelta(hours=1)), *(job(f"d{n}") for n in range(20))]
    assert {result.status for result in await (await flushed()).enqueue(jobs)} == {EnqueueStatus.QUEUED}
    claims = await (await flushed()).claim("w", leases=LEASES, limit=22)
    assert len({claim.job_id for claim in claims}) == 22
    assert dict((await (await flushed()).renew(claims)).lost) == {}
    settlements: list[Settlement] = [Completed(claim=claim, result=b"1") for claim in claims[3:]]
    settlements += [
        Failed(claim=claims[0], error=ERROR),
        Retried(claim=claims[1], delay=timedelta(0), error=ERROR),
        Released(claim=claims[2]),
    ]
    outcomes = await (await flushed()).settle(settlements)
    assert {outcome.status for outcome in outcomes} == {SettleStatus.APPLIED}
    assert await (await flushed()).promote(["c"]) == 1
    assert await (await flushed()).cancel("c") is CancelResult.CANCELLED
    assert await (await flushed()).retry([claims[0].job_id]) == 1
    assert len(await (await flushed()).claim("w", leases=LEASES, limit=50)) == 3
    await (await flushed()).recover(10)
    await client.aclose()
    await storage.disconnect()


async def test_a_batch_whose_scripts_are_lost_in_part(own_server: ValkeyProcess) -> None:
    """Jobs of one batch that were added before their script was lost are not taken for duplicates."""
    storage = BullMQStorage(own_server.url)
    await storage.connect()
    async with Redis.from_url(own_server.url) as client:
        await client.script_flush()
        await client.script_load(scripts()["addStandardJob"].text)
    results = await storage.enqueue([job("a"), job("b", delay=timedelta(hours=1)), job("a"), job("c", priority=1)])
    assert [result.status for result in results] == [
        EnqueueStatus.QUEUED,
        EnqueueStatus.QUEUED,
        EnqueueStatus.DUPLICATE,
        EnqueueStatus.QUEUED,
    ]
    await storage.disconnect()


VERBS: dict[str, Callable[[BullMQStorage, Claim], Awaitable[object]]] = {
    "enqueue": lambda storage, _: storage.enqueue([job("x")]),
    "claim": lambda storage, _: storage.claim("w", leases=LEASES, limit=10),
    "wait": lambda storage, _: storage.wait(("*",), timeout=timedelta(seconds=60)),
    "renew": lambda storage, claim: storage.renew([claim]),
    "settle": lambda storage, claim: storage.settle([Completed(claim=claim, result=b"1")]),
    "release": lambda storage, claim: storage.settle([Released(claim=claim)]),
    "recover": lambda storage, _: storage.recover(10),
    "sweep": lambda storage, _: storage.sweep(10),
    "cancel": lambda storage, _: storage.cancel("a"),
    "status": lambda storage, _: storage.status(["a"]),
    "result": lambda storage, _: storage.result("a"),
    "counts": lambda storage, _: storage.counts(),
    "list": lambda storage, _: storage.list(JobState.QUEUED),
    "workers": lambda storage, _: storage.workers(),
    "pause": lambda storage, _: storage.pause(),
    "retry": lambda storage, _: storage.retry(["a"]),
    "drain": lambda storage, _: storage.drain(),
    "clean": lambda storage, _: storage.clean(JobState.FAILED, older_than=SHORT),
    "events": lambda storage, _: _enter(storage),
}


async def _enter(storage: BullMQStorage) -> None:
    async with storage.events():
        pass


async def test_a_dead_server_is_unavailable_and_a_new_one_is_used(own_server: ValkeyProcess) -> None:
    """Every verb says so within its time while the server is gone, and works by itself when it is back."""
    storage = BullMQStorage(own_server.url, timeout=timedelta(seconds=2))
    await storage.connect()
    await storage.enqueue([job("a"), job("b")])
    claim = await claim_one(storage)
    own_server.stop()
    async with asyncio.timeout(PATIENCE):
        for verb in VERBS.values():
            with pytest.raises(StorageUnavailable):
                await verb(storage, claim)
    own_server.start()
    for verb in VERBS.values():
        await verb(storage, claim)
    await storage.disconnect()


async def test_a_wait_notices_that_its_server_died(own_server: ValkeyProcess) -> None:
    """A blocked wait ends with the connection it blocks on."""
    storage = BullMQStorage(own_server.url)
    await storage.connect()
    waiting = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    await asyncio.sleep(0.05)
    own_server.kill()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StorageUnavailable):
            await waiting
    await storage.disconnect()


class Line:
    """A line to a server that can be cut or go dead: told of each request, `judge` says whether it gets through."""

    def __init__(self, server: ValkeyProcess, judge: Callable[[bytes], str]) -> None:
        self._server = server
        self._judge = judge
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> str:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for writer in self._writers:
            writer.close()
        await self._listener.wait_closed()

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writers += [back, to_server]
        answers = asyncio.create_task(_copy(server, back))
        while request := await client.read(1 << 20):
            verdict = self._judge(request)
            if verdict == "cut":
                break
            if verdict == "pass":
                to_server.write(request)
        answers.cancel()
        back.close()
        to_server.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 20):
        target.write(data)


async def test_a_line_that_goes_dead_ends_a_wait(own_server: ValkeyProcess) -> None:
    """A connection on which nothing comes back any more holds a wait up for seconds, not for ever."""
    async with Line(own_server, lambda request: "hold" if b"CLIENT\r\n$2\r\nID" in request else "pass") as url:
        storage = BullMQStorage(url)
        await storage.connect()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StorageUnavailable):
                await storage.wait(("*",), timeout=timedelta(seconds=60))
        await storage.disconnect()


async def test_a_wait_that_cannot_be_ended_leaves_no_task(own_server: ValkeyProcess) -> None:
    """When the server cannot be told to end a wait, the wait fails, and nothing of it goes on unobserved."""
    async with Line(own_server, lambda request: "cut" if b"UNBLOCK" in request else "pass") as url:
        storage = BullMQStorage(url)
        await storage.connect()
        tasks = asyncio.all_tasks()
        with pytest.raises(StorageUnavailable):
            await storage.wait(("*",), timeout=timedelta(milliseconds=50))
        assert not [task for task in asyncio.all_tasks() - tasks if "ask" in repr(task.get_coro())]
        await storage.disconnect()


async def test_claims_are_not_lost_with_a_later_step(own_server: ValkeyProcess) -> None:
    """A first claim is a small one, and what it brought is handed out although the connection broke in the second."""
    verdicts = iter(["pass", "cut", "pass"])
    script = scripts()["moveToActive"].sha.encode()

    def judge(request: bytes) -> str:
        return next(verdicts) if script in request else "pass"

    async with Line(own_server, judge) as url:
        storage = BullMQStorage(url)
        await storage.connect()
        await storage.enqueue([job("a"), job("b")])
        assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=2)] == ["a"]
        assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=2)] == ["b"]
        await storage.disconnect()


async def test_a_cancelled_claim_gives_its_jobs_back(storage: BullMQStorage) -> None:
    """Whenever a claim is cancelled, its jobs are claimable at once, and their attempt is not counted."""
    await storage.enqueue([job(f"job-{number}") for number in range(10)])
    for turn in range(30):
        claiming = asyncio.create_task(storage.claim("w", leases=LEASES, limit=10))
        await asyncio.sleep(0.0002 * (turn % 12))
        if claiming.cancel():
            with pytest.raises(asyncio.CancelledError):
                await claiming
        else:
            await storage.settle([Released(claim=claim) for claim in claiming.result()])
        assert (await storage.counts())[JobState.QUEUED] == 10
    claims = await storage.claim("w", leases=LEASES, limit=10)
    assert [(claim.job_id, claim.attempt) for claim in claims] == [(f"job-{number}", 1) for number in range(10)]


async def test_a_burst_waits_its_turn(storage: BullMQStorage, client: Any) -> None:
    """Many more calls at once than there are connections all succeed, and no connection is made for each."""
    await asyncio.gather(*(storage.enqueue([job(f"job-{number}")]) for number in range(400)))
    assert (await storage.counts())[JobState.QUEUED] == 400
    assert len(await client.client_list()) < 100


def test_event_loops_one_after_another(redis_url: str) -> None:
    """One storage object serves a second event loop after the first has ended, even without a disconnect."""
    storage = BullMQStorage(redis_url, f"test-{uuid.uuid4().hex}")

    async def use(*, disconnect: bool) -> None:
        await storage.connect()
        async with storage.events() as first, storage.events() as second, asyncio.timeout(PATIENCE):
            await storage.enqueue([job(uuid.uuid4().hex)])
            async with storage.events():
                assert await first.get() == await second.get()
        if disconnect:
            await storage.disconnect()

    for disconnect in (True, False, True):
        asyncio.run(use(disconnect=disconnect))


async def test_a_hanging_server_is_unavailable_in_time(redis_url: str) -> None:
    """A server that takes connections and never answers is given up after the storage's timeout."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    storage = BullMQStorage(f"redis://127.0.0.1:{port}", timeout=timedelta(milliseconds=200))
    async with server, asyncio.timeout(PATIENCE):
        with pytest.raises(StorageUnavailable):
            await storage.connect()
        server.close()


async def test_no_server_at_all() -> None:
    """A port nobody listens on is unavailable, not a bug."""
    storage = BullMQStorage(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(StorageUnavailable):
        await storage.connect()


async def test_a_subscription_outlives_its_server(own_server: ValkeyProcess) -> None:
    """Events go on where they stopped, without the subscriber's help."""
    storage = BullMQStorage(own_server.url)
    await storage.connect()
    async with storage.subscribe("a") as events, asyncio.timeout(PATIENCE):
        await asyncio.to_thread(own_server.restart)
        await storage.enqueue([job("a")])
        assert (await events.get()).kind is JobEventKind.QUEUED
    await storage.disconnect()


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (redis.exceptions.ConnectionError("Connection refused"), StorageUnavailable),
        (redis.exceptions.TimeoutError("Timeout"), StorageUnavailable),
        (redis.exceptions.BusyLoadingError("loading"), StorageUnavailable),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), StorageUnavailable),
        (redis.exceptions.OutOfMemoryError("command not allowed"), StorageUnavailable),
        (redis.exceptions.MasterDownError("Link with MASTER is down"), StorageUnavailable),
        (redis.exceptions.ResponseError("BUSY Redis is busy running a script."), StorageUnavailable),
        (redis.exceptions.ResponseError("MISCONF Errors writing to disk"), StorageUnavailable),
        (redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas"), StorageUnavailable),
        (TimeoutError(), StorageUnavailable),
        (ConnectionResetError(), StorageUnavailable),
        (redis.exceptions.AuthenticationError("invalid password"), StorageError),
        (redis.exceptions.AuthorizationError("no"), StorageError),
        (redis.exceptions.NoPermissionError("this user has no permissions"), StorageError),
        (redis.exceptions.ResponseError("WRONGTYPE Operation against a key"), StorageError),
        (redis.exceptions.ResponseError("ERR unknown command"), StorageError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_errors_of_the_server(error: Exception, ours: type[WorkersError]) -> None:
    """What passes by itself is unavailability; what does not is an error to repair."""
    assert type(translate(error)) is ours


# Events and cancelling


async def test_a_scheduled_job_is_not_failing(storage: BullMQStorage) -> None:
    """BullMQ's `delayed` event means two things; only a retry is a failure."""
    async with storage.events() as events, asyncio.timeout(PATIENCE):
        await storage.enqueue([job("a", delay=timedelta(milliseconds=20))])
        await storage.wait(("*",), timeout=timedelta(seconds=5))
        claim = await claim_one(storage)
        await storage.settle([Retried(claim=claim, delay=timedelta(hours=1), error=ERROR)])
        await storage.cancel("a")
        kinds = [(await events.get()).kind for _ in range(4)]
    expected = [JobEventKind.QUEUED, JobEventKind.ACTIVE, JobEventKind.FAILING, JobEventKind.CANCELLED]
    assert kinds == expected


async def test_a_tombstone_ends_with_a_new_generation(storage: BullMQStorage) -> None:
    """A cancelled id that was enqueued again is a job like any other."""
    await storage.enqueue([job("a")])
    await storage.cancel("a")
    outcome = await storage.result("a")
    assert outcome is not None
    assert outcome.kind is OutcomeKind.CANCELLED
    assert [result.status for result in await storage.enqueue([job("a")])] == [EnqueueStatus.QUEUED]
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1", keep=DROP)])
    assert await storage.result("a") is None


async def test_a_claim_of_another_id_is_another_job(storage: BullMQStorage) -> None:
    """The id that a claim shows is the job it speaks of."""
    await storage.enqueue([job("a"), job("b")])
    claim = await claim_one(storage)
    [outcome] = await storage.settle([Completed(claim=replace(claim, job_id="b"), result=b"1")])
    assert outcome.status is SettleStatus.LOST
