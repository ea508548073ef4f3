"""What lies in a Bull queue and is none of its own is refused, reported or set aside; others' jobs run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta

import pytest
from redis.asyncio import Redis

from tests.workers.running import AT_ONCE, Recorder, done, outcome, running
from tests.workers.storage.bull.steps import ERROR, LEASES, NodeBull, claimed
from workers import WorkerOptions
from workers.errors import ForeignQueue, StorageDamaged, StorageError
from workers.jobs import Claim, Completed, EnqueueStatus, Failed, JobState, OutcomeKind, SettleStatus
from workers.storage.bull import BullStorage
from workers.testing.steps import claim_one, job
from workers.worker import Worker
from workers.worker.events import WorkerEventKind


def worker_on(storage: BullStorage, recorder: Recorder) -> Worker:
    return Worker(
        storage,
        {"*": done},
        observers=[recorder],
        options=WorkerOptions(retry=AT_ONCE, poll_interval=timedelta(seconds=1)),
    )


def every_call(storage: BullStorage, held: Claim) -> Sequence[Callable[[], Awaitable[object]]]:
    """A call of each verb, for one after another to be tried."""
    return (
        lambda: storage.enqueue([job("more")]),
        lambda: storage.claim("w", leases=LEASES, limit=1),
        lambda: storage.wait(["*"], timeout=timedelta(seconds=1)),
        lambda: storage.renew([held]),
        lambda: storage.settle([Completed(claim=held, result=b"1")]),
        lambda: storage.recover(10),
        lambda: storage.sweep(10),
        lambda: storage.cancel("waiting"),
        lambda: storage.status(["waiting"]),
        lambda: storage.result("waiting"),
        lambda: storage.counts(),
        lambda: storage.workers(),
        lambda: storage.list(JobState.COMPLETED),
        lambda: storage.pause(),
        lambda: storage.retry(["waiting"]),
        lambda: storage.remove(["waiting"]),
        lambda: storage.complete("waiting", b"1"),
        lambda: storage.promote(["waiting"]),
        lambda: storage.drain(),
        lambda: storage.clean(JobState.COMPLETED, older_than=timedelta(0)),
        lambda: storage.update_result_ttl("waiting", timedelta(1)),
    )


LATER: Mapping[str, tuple[str | int, ...]] = {
    "completed": ("ZADD", 1, "1"),
    "failed": ("ZADD", 1, "1"),
    "priority": ("ZADD", 1, "1"),
    "repeat": ("ZADD", 1, "__default__::::500"),
    "stalled-check": ("SET", 1_700_000_000_000),
    "events": ("XADD", "*", "event", "added"),
}
"""A key that Bull 1 never has, or never so, and the command that writes it."""


async def opened_again(storage: BullStorage, client: Redis) -> None:
    """Another storage opens the queue."""
    port = client.connection_pool.connection_kwargs["port"]
    other = BullStorage(f"redis://127.0.0.1:{port}/0", storage.queue)
    await other.connect()
    await other.disconnect()


@pytest.mark.parametrize("name", LATER)
async def test_a_queue_of_a_later_library_is_refused(name: str, storage: BullStorage, node: NodeBull) -> None:
    """It is not opened, and from then on no verb touches one that is open; the error says what to do."""
    await storage.enqueue([job("held"), job("waiting")])
    held = await claim_one(storage)
    command, *rest = LATER[name]
    await node.client.execute_command(str(command), node.key(name), *rest)
    whose = "BullMQ, whose URL begins with" if name == "events" else "Bull 3 or newer: leave it to them"
    for call in (*every_call(storage, held), lambda: opened_again(storage, node.client), storage.repair):
        with pytest.raises(ForeignQueue, match=whose):
            await call()
    assert await node.client.exists(node.key("more"), node.key("meta-paused")) == 0
    assert (await node.line("wait"), await node.line("active")) == (["waiting"], ["held"])


async def add_of_bull_4(node: NodeBull, job_id: str, line: str = "wait") -> None:
    """A job as Bull 4 adds it."""
    record = {"name": "__default__", "data": "{}", "opts": "{}", "timestamp": 1, "delay": 0, "priority": 0}
    await node.client.hset(node.key(job_id), mapping=record)
    await node.client.lpush(node.key(line), job_id)


@pytest.mark.parametrize("line", ["wait", "paused", "active"])
async def test_a_queue_with_a_job_of_bull_4_is_refused(line: str, storage: BullStorage, node: NodeBull) -> None:
    """No key tells, but its record does."""
    await opened_again(storage, node.client)
    await add_of_bull_4(node, "1", line)
    with pytest.raises(ForeignQueue, match="has jobs without `attempts`; this queue is one of Bull 3 or newer"):
        await opened_again(storage, node.client)


async def test_a_job_of_bull_4_is_never_claimed(storage: BullStorage, node: NodeBull) -> None:
    """Between two looks at the queue, too: those before and behind it are."""
    await storage.enqueue([job("before")])
    await add_of_bull_4(node, "1")
    await storage.enqueue([job("behind")])
    assert await claimed(storage) == ["before", "behind"]
    with pytest.raises(ForeignQueue):
        await claimed(storage)
    assert await node.line("wait") == ["1"]


async def test_a_damaged_queue_can_be_opened(storage: BullStorage, node: NodeBull) -> None:
    """Who wants to repair it has to."""
    await node.client.set(node.key("wait"), "junk")
    await opened_again(storage, node.client)


@pytest.mark.parametrize("name", ["wait", "paused", "active", "delayed", "completed", "failed", "id", "meta-paused"])
async def test_keys_of_another_type(name: str, storage: BullStorage, node: NodeBull) -> None:
    """Every verb says so and changes nothing; with the key gone the queue works on."""
    await storage.enqueue([job("held"), job("waiting")])
    held = await claim_one(storage)
    await node.client.delete(node.key(name))
    await node.client.hset(node.key(name), "foreign", 1)
    for call in every_call(storage, held):
        with pytest.raises(StorageError, match="this is no queue of Bull 1"):
            await call()
    assert await node.client.hgetall(node.key(name)) == {"foreign": "1"}
    await node.client.delete(node.key(name), node.key("wait"))
    await storage.enqueue([job("after")])
    assert await claimed(storage) == ["after"]


async def test_a_counter_that_is_no_number_is_refused(storage: BullStorage, node: NodeBull) -> None:
    """Nothing is enqueued halfway, and what adds nothing goes on; a repair begins where no id has been."""
    await storage.enqueue([job("held")])
    held = await claim_one(storage)
    await node.client.set(node.key("id"), "junk")
    with pytest.raises(StorageDamaged, match="is no number; set it to one"):
        await storage.enqueue([job("one")])
    assert await node.client.exists(node.key("one")) == 0
    with pytest.raises(StorageDamaged, match="is no number"):
        await storage.settle([Completed(claim=held, result=b"1", then=job("one"))])
    assert [one.status for one in await storage.settle([Completed(claim=held, result=b"1")])] == [SettleStatus.APPLIED]
    assert [one.id for one in await storage.repair()] == ["id"]
    assert (await storage.enqueue([job("one")]))[0].status is EnqueueStatus.QUEUED


async def test_what_is_due_never_ends_no_wait(storage: BullStorage, node: NodeBull) -> None:
    """A score that is no time is as far off as any."""
    await node.client.zadd(node.key("delayed"), {"never": float("inf")})
    await storage.wait(["work"], timeout=timedelta(milliseconds=1))


async def test_a_key_that_is_no_job_is_not_overwritten(storage: BullStorage, node: NodeBull) -> None:
    """Where a job's hash would be something else lies: an error names the job, its neighbours are enqueued."""
    await node.client.set(node.key("taken"), "precious")
    with pytest.raises(StorageError, match="job 'taken': its key in Redis holds something else"):
        await storage.enqueue([job("before"), job("taken"), job("after")])
    assert await node.client.get(node.key("taken")) == "precious"
    assert await claimed(storage) == ["before", "after"]
    assert await storage.status(["taken"]) == [None]


async def test_a_continuation_without_a_place_is_an_error(storage: BullStorage, node: NodeBull) -> None:
    """The completion that it follows is not applied without it."""
    await node.client.set(node.key("taken"), "precious")
    await storage.enqueue([job("first")])
    [outcome] = await storage.settle([Completed(claim=await claim_one(storage), result=b"1", then=job("taken"))])
    assert outcome.status is SettleStatus.ERROR
    [found] = await storage.status(["first"])
    assert found is not None
    assert found.state is JobState.PROCESSING


async def test_continuations_that_bull_cannot_keep_spare_their_neighbours(storage: BullStorage) -> None:
    """A continuation for too far ahead is an error of that settlement alone."""
    await storage.enqueue([job("one"), job("two")])
    one, two = await storage.claim("w", leases=LEASES, limit=2)
    far = Completed(claim=one, result=b"1", then=job("far", delay=timedelta(days=30)))
    outcomes = await storage.settle([far, Completed(claim=two, result=b"1")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]
    assert "24 days" in str(outcomes[0].detail)


@pytest.mark.parametrize(
    "damage",
    [
        {"data": "not json"},
        {"data": ""},
        {"data": "[" * 5_000},
        {"opts": "not json"},
        {"opts": "[]"},
        {"opts": ""},
        {"opts": "{" * 5_000},
    ],
    ids=["data", "empty-data", "deep-data", "opts", "list-opts", "empty-opts", "deep-opts"],
)
async def test_a_job_that_cannot_be_read_fails(damage: dict[str, str], storage: BullStorage, node: NodeBull) -> None:
    """It is set aside with a reason, once, and the worker goes on."""
    await node.add("bad", attempts=3, **damage)
    await node.add("good")
    recorder = Recorder()
    async with running(worker_on(storage, recorder)):
        assert (await outcome(storage, "good")).kind is OutcomeKind.COMPLETED
        bad = await outcome(storage, "bad")
    assert bad.kind is OutcomeKind.FAILED
    assert bad.error is not None
    assert bad.error.message
    assert recorder.of(WorkerEventKind.ERROR) == []
    assert await node.client.smembers(node.key("failed")) == {"bad"}


async def test_numbers_that_are_none_read_as_if_they_were_not_there(storage: BullStorage, node: NodeBull) -> None:
    """Text, holes and absurd numbers in a job's fields and options break neither its run nor what is read of it."""
    opts = '{"attempts":"x","backoff":{"delay":1e400},"workers":{"keepCompleted":"x","priority":-1,"backoff":[1,2]}}'
    junk = {"timestamp": "x", "attempts": "1e400", "attemptsMade": "NaN", "stalledCounter": "-9", "delay": "?"}
    await node.add("junk", opts=opts, progress="\x00", stacktrace='{"a":1}', **junk)
    await node.add("bare", opts='{"workers":7}')
    await node.client.hdel(
        node.key("bare"), "timestamp", "attempts", "attemptsMade", "stacktrace", "returnvalue", "progress"
    )
    assert [one.id for one in (await storage.list(JobState.QUEUED)).jobs] == ["junk", "bare"]
    claims = await storage.claim("w", leases=LEASES, limit=2)
    assert [(one.attempt, one.max_attempts, one.priority) for one in claims] == [(1, 1, 0)] * 2
    await storage.settle([Completed(claim=one, result=b"1") for one in claims])
    assert (await storage.counts())[JobState.COMPLETED] == 2


async def test_a_record_of_another_type_is_set_aside(storage: BullStorage, node: NodeBull) -> None:
    """An id in line whose key is no hash is taken off and told once, and what lies there is kept."""
    await node.client.set(node.key("text"), "precious")
    for line in ("wait", "active"):
        await node.client.lpush(node.key(line), "text")
    await node.client.zadd(node.key("delayed"), {"text": 1})
    await node.add("good")
    assert await claimed(storage) == ["good"]
    await storage.recover(10)
    assert await node.line("active") == ["good"]
    assert [one.id for one in storage.news()] == ["text"]
    assert await node.client.get(node.key("workers:quarantine:text")) == "precious"


async def test_ids_like_keys_of_the_queue_cost_no_key(storage: BullStorage, node: NodeBull) -> None:
    """Somebody lined up names of keys: no verb takes what lies there for a job, and removes it."""
    names = ("wait", "completed", "failed", "id", "delayed", "active")
    await storage.enqueue([job("done"), job("bad"), job("held"), job("good"), job("later", delay=timedelta(days=1))])
    done, bad, _ = await storage.claim("w", leases=LEASES, limit=3)
    await storage.settle([Completed(claim=done, result=b"1"), Failed(claim=bad, error=ERROR)])
    await node.client.rpush(node.key("wait"), *names)
    await node.client.rpush(node.key("active"), *names)
    await node.client.sadd(node.key("completed"), *names)
    await node.client.zadd(node.key("delayed"), dict.fromkeys(names, 1))
    for verb in (storage.remove, storage.retry, storage.promote):
        assert await verb(names) == 0
    assert await storage.status(names) == [None] * len(names)
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta(days=1)) == len(names)
    await storage.recover(10)
    await storage.sweep(10)
    assert await claimed(storage) == ["good"]
    assert await storage.drain() == 1
    assert [one.id for one in (await storage.list(JobState.PROCESSING)).jobs] == ["held", "good"]
    assert await node.client.exists(*(node.key(name) for name in ("completed", "failed", "id", "active"))) == 4


async def test_junk_on_every_channel_is_passed_over(storage: BullStorage, node: NodeBull) -> None:
    """Waiters are not kept from their work, nor made to spin by more than a look for each message."""
    channels = [node.key(name) for name in ("jobs", "delayed", "paused", "workers:cancels@0")]
    channels += [f"{name}@{storage.queue}" for name in ("waiting", "completed", "failed", "progress", "stalled")]
    recorder = Recorder()
    async with running(worker_on(storage, recorder)), storage.events(), storage.cancel_requests():
        for channel in channels:
            for junk in ("", "error", "NaN", "Infinity", "-1e400", "[]", "{", "[[[[", "\x00", "x" * 100_000):
                await node.client.publish(channel, junk)
        await node.add("good")
        assert (await outcome(storage, "good")).kind is OutcomeKind.COMPLETED
    assert recorder.of(WorkerEventKind.ERROR) == []


async def test_an_id_twice_in_line_runs_once(storage: BullStorage, node: NodeBull) -> None:
    """What Node lined up twice is taken once."""
    raw = await node.add()
    await node.client.lpush(node.key("wait"), raw, raw)
    assert await claimed(storage) == [raw]
    assert await node.line("wait") == []
