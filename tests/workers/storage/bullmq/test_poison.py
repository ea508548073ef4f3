"""What other producers may write into a queue: it is set aside, told once, and everything else goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Final

import bullmq
import pytest
from redis.asyncio import Redis

from tests.patience import until
from tests.workers.running import Recorder, done, outcome, running
from workers.errors import StorageDamaged, StorageError, StorageUnavailable
from workers.jobs import JobState, OutcomeKind, RepairOutcome, SettleStatus
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq.codec import RESERVED_IDS
from workers.storage.bullmq.lua_files import scripts
from workers.testing import steps
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job

LEASE: Final = timedelta(milliseconds=300)
KEYS: Final = sorted(bullmq.queue_keys.QueueKeys().getKeys(""))


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def produce(storage: BullMQStorage, client: Any, **options: object) -> None:
    """One job, by the stock producer, which may be answered with an error after it has written the job's hash."""
    queue = bullmq.Queue(storage.queue, {"connection": client})
    try:
        await queue.add("work", {"of": "theirs"}, options)
    except Exception as error:
        assert "WRONGTYPE" in str(error)  # noqa: PT017 - most of them are not


def key(storage: BullMQStorage, name: str) -> str:
    return f"bull:{storage.queue}:{name}"


@pytest.mark.parametrize("job_id", KEYS)
@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"priority": 5}], ids=["waits", "is delayed", "has a priority"])
async def test_a_job_with_the_name_of_a_key_is_set_aside(
    storage: BullMQStorage, client: Any, job_id: str, options: dict[str, object]
) -> None:
    """Whichever key it is: the worker goes on, and what it claimed before can be completed."""
    recorder = Recorder()
    await produce(storage, client, jobId=job_id, **options)
    # Some are never added: the key is there before, and the producer takes it for a job of that id.
    written = [job_id] if await client.hexists(key(storage, "meta"), "data") else []
    if job_id != "meta":
        written = [job_id] if await client.type(key(storage, job_id)) == "hash" else []
    async with running(Worker(storage, {"work": done}, lease=LEASE, observers=[recorder])):
        if written:
            await recorder.seen(Kind.SET_ASIDE)
        await steps.enqueue(storage, steps.job("ours"))
        assert (await outcome(storage, "ours")).kind is OutcomeKind.COMPLETED
    assert [event.job_ids for event in recorder.of(Kind.SET_ASIDE)] == [(name,) for name in written]
    assert [entry.id for entry in await storage.quarantine()] == written


def test_the_names_are_those_that_are_looked_for() -> None:
    """The script and the codec know the same names of keys."""
    text = scripts()["guard"].text
    assert [name for name in RESERVED_IDS if f"'{name}'" not in text and name] == []


async def test_a_job_within_the_queues_settings_is_taken_out_of_them(storage: BullMQStorage, client: Any) -> None:
    """The id `meta` is that of a hash, too: what BullMQ keeps there stays."""
    await client.hset(key(storage, "meta"), mapping={"name": "work", "data": "{}", "timestamp": 1, "concurrency": 50})
    await client.lpush(key(storage, "wait"), "meta")
    assert await steps.claim(storage) == []
    assert [entry.id for entry in await storage.quarantine()] == ["meta"]
    assert await client.hgetall(key(storage, "meta")) == {"concurrency": "50"}
    assert {one.outcome for one in await storage.repair()} == {RepairOutcome.REQUEUED}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (("SET", "1", "x"), "its key is a string, not a hash"),
        (("SADD", "1", "x"), "its key is a set, not a hash"),
        (("HSET", "1", "ats", "many"), "its field `ats` is no whole number"),
        (("HSET", "1", "atm", "1.5"), "its field `atm` is no whole number"),
        (("HSET", "1", "stc", "99999999999999999999"), "its field `stc` is no whole number"),
    ],
)
@pytest.mark.parametrize("line", ["wait", "prioritized", "delayed", "active"])
async def test_what_is_no_job_is_set_aside(
    storage: BullMQStorage, client: Any, spoil: tuple[str, str, str], reason: str, line: str
) -> None:
    """Wherever its id stands; jobs before and behind it run, and no due job is lost with it."""
    await steps.enqueue(storage, steps.job("before", delay=timedelta(milliseconds=1)))
    command, name, *rest = spoil
    await client.execute_command(command, key(storage, name), *rest)
    if line in ("wait", "active"):
        await client.lpush(key(storage, line), "1")
    else:
        await client.zadd(key(storage, line), {"1": 0})
    await steps.enqueue(storage, steps.job("behind", delay=timedelta(milliseconds=1)), steps.job("last"))
    recorder = Recorder()
    async with running(Worker(storage, {"work": done}, lease=LEASE, observers=[recorder])):
        event = await recorder.seen(Kind.SET_ASIDE)
        for job_id in ("before", "behind", "last"):
            assert (await outcome(storage, job_id)).kind is OutcomeKind.COMPLETED
    assert event.job_ids == ("1",)
    assert str(event.error) == f"'1' was set aside: {reason}"
    assert (await storage.counts())[JobState.PROCESSING] == 0


async def test_a_job_named_as_a_lock_leaves_the_lock_alone(storage: BullMQStorage, client: Any) -> None:
    """It is set aside, and whoever holds the job of that lock goes on holding it."""
    await steps.enqueue(storage, steps.job("ours"))
    [held] = await steps.claim(storage)
    await client.lpush(key(storage, "wait"), "ours:lock")
    assert await steps.claim(storage) == []
    assert [entry.id for entry in await storage.quarantine()] == ["ours:lock"]
    assert await client.get(key(storage, "ours:lock")) == held.token


async def test_a_running_job_that_is_none_any_more_costs_no_neighbour_its_lease(
    storage: BullMQStorage, client: Any
) -> None:
    """Its lease and the others' are renewed, and what is asked of them is heard."""
    await steps.enqueue(storage, steps.job("bad"), steps.job("good"))
    claims = await steps.claim(storage, 2)
    await client.set(key(storage, "bad"), "x")
    await storage.cancel("good")
    renewal = await storage.renew(claims)
    assert renewal.lost == {}
    assert renewal.cancel_requested == {claim.token for claim in claims if claim.job_id == "good"}


async def test_an_id_that_is_no_text_ends_no_worker(storage: BullMQStorage, redis_url: str) -> None:
    """What stands in line may be any bytes; the lease of that job is renewed, and it fails as one without a record."""
    async with Redis.from_url(redis_url) as client:
        await client.lpush(key(storage, "wait"), b"\xff\xfe")
    [claim] = await steps.claim(storage)
    assert (await storage.renew([claim])).lost == {}
    [settled] = await storage.settle([steps.failed(claim)])
    assert settled.status is not SettleStatus.LOST


async def test_a_length_of_the_events_that_is_no_number_is_named_and_repaired(
    storage: BullMQStorage, client: Any
) -> None:
    """BullMQ's recovery would stop at it each time."""
    await client.hset(key(storage, "meta"), "opts.maxLenEvents", "many")
    with pytest.raises(StorageDamaged, match=r"`opts\.maxLenEvents` is no number"):
        await storage.recover(10)
    assert [one.outcome for one in await storage.repair()] == [RepairOutcome.MOVED]
    await storage.recover(10)


async def test_a_thousand_of_them_keep_nobody_out(storage: BullMQStorage, client: Any) -> None:
    """Each is told of once, by whichever of two workers met it."""
    names = [f"theirs-{number}" for number in range(1_000)]
    pipe = client.pipeline()
    for name in names:
        pipe.set(key(storage, name), "x")
        pipe.lpush(key(storage, "wait"), name)
    await pipe.execute()
    await steps.enqueue(storage, steps.job("ours"))
    recorder = Recorder()
    workers = [Worker(storage, {"work": done}, lease=LEASE, observers=[recorder]) for _ in range(2)]
    async with running(*workers):
        assert (await outcome(storage, "ours")).kind is OutcomeKind.COMPLETED
    told = [job_id for event in recorder.of(Kind.SET_ASIDE) for job_id in event.job_ids]
    assert sorted(told) == sorted(names)
    assert recorder.of(Kind.ERROR) == []


@pytest.mark.parametrize("name", ["wait", "active", "completed", "events", "marker", "meta", "stalled", "id"])
async def test_a_key_in_the_way_is_named_until_it_is_repaired(storage: BullMQStorage, client: Any, name: str) -> None:
    """It may be anything, so nobody touches it unasked; what waits for it is done once it is gone."""
    await steps.enqueue(storage, steps.job("before"))
    moved = key(storage, f"{name}-before")
    if await client.exists(key(storage, name)):
        await client.rename(key(storage, name), moved)
    await client.set(key(storage, name), "no queue's")
    recorder = Recorder()
    async with running(Worker(storage, {"work": done}, lease=LEASE, observers=[recorder])):
        error = (await recorder.seen(Kind.ERROR, 2)).error
        assert isinstance(error, StorageError | StorageUnavailable)
        assert key(storage, name) in str(error)
        found = [one for one in await storage.repair() if one.outcome is RepairOutcome.MOVED]
        assert [one.id for one in found] == [name]
        await steps.enqueue(storage, steps.job("after"))
        assert (await outcome(storage, "after")).kind is OutcomeKind.COMPLETED
    assert await client.get(key(storage, f"workers:quarantine:{name}")) == "no queue's"


async def test_a_settlement_waits_for_the_repair(storage: BullMQStorage, client: Any) -> None:
    """A job is not failed for a key in the way of its record: nothing has happened until that is gone."""
    await steps.enqueue(storage, steps.job("job"))
    [held] = await steps.claim(storage)
    await client.set(key(storage, "completed"), "no queue's")
    with pytest.raises(StorageUnavailable, match="completed is a string, not a zset"):
        await storage.settle([steps.completed(held)])
    with pytest.raises(StorageDamaged):
        await storage.recover(10)
    await storage.repair()
    await steps.apply(storage, steps.completed(held))
    assert await steps.state(storage, "job") is JobState.COMPLETED


async def test_repaired_jobs_run(storage: BullMQStorage, client: Any) -> None:
    """Under an id that is no key's, with fresh counters; what is no job stays, until it is dropped."""
    await produce(storage, client, jobId="completed", attempts=4)
    await produce(storage, client, jobId="counted")
    await client.hset(key(storage, "counted"), "atm", "often")
    await client.set(key(storage, "9"), "x")
    await client.lpush(key(storage, "wait"), "9")
    assert await steps.claim(storage) == []
    assert len(storage.news()) == 3
    assert storage.news() == []
    outcomes = {one.id: one.outcome for one in await storage.repair()}
    assert outcomes == {
        "completed": RepairOutcome.REQUEUED,
        "counted": RepairOutcome.REQUEUED,
        "9": RepairOutcome.KEPT,
    }
    claims = await steps.claim(storage, 10)
    assert {claim.job_id: (claim.attempt, claim.max_attempts) for claim in claims} == {
        "completed": (1, 4),
        "counted": (1, 1),
    }
    assert json.loads(claims[0].payload) == {"of": "theirs"}
    [dropped] = await storage.repair(drop=True)
    assert dropped.outcome is RepairOutcome.DROPPED
    assert await storage.quarantine() == []
    assert [name async for name in client.scan_iter(key(storage, "workers:quarantine*"))] == []


@pytest.mark.parametrize(
    "parent",
    ["not JSON", "[]", '"text"', "{}", '{"id":7}', '{"id":"1","queueKey":null}', '{"id":{},"queueKey":"bull:q"}'],
)
async def test_a_job_with_an_unusable_parent_fails_and_does_not_circle(
    storage: BullMQStorage, client: Any, parent: str
) -> None:
    """BullMQ's script stops at it each time; here it fails once, with the reason, and can be retried."""
    await produce(storage, client, jobId="child")
    await client.hset(key(storage, "child"), mapping={"parent": parent, "parentKey": "bull:q:1"})
    runs: list[str] = []

    async def handler(job: Job) -> None:
        runs.append(job.id)

    async with running(Worker(storage, {"work": handler}, lease=LEASE)):
        ended = await outcome(storage, "child")
        assert ended.kind is OutcomeKind.FAILED
        assert ended.error is not None
        assert "`parent`" in ended.error.message
        assert runs == ["child"]
        assert await storage.retry(["child"]) == 1
        await until(lambda: len(runs) == 2)
        assert (await outcome(storage, "child")).kind is OutcomeKind.COMPLETED


async def test_a_sweep_passes_over_records_that_are_none(storage: BullMQStorage, client: Any) -> None:
    """They are set aside by the recovery before it."""
    await client.set(key(storage, "old"), "x")
    await client.zadd(key(storage, "completed"), {"old": 1})
    await storage.recover(10)
    assert await storage.sweep(10) == 0
    assert [entry.id for entry in await storage.quarantine()] == ["old"]
