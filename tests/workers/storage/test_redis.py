"""What only the Redis storage does: its keys, its scripts, servers that lose them or die, and foreign values."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from tests.servers import ValkeyProcess, free_port
from workers import JobState, StorageError, StorageUnavailable
from workers.deduplication_keys import Deduplication, DeduplicationMode
from workers.jobs import (
    DROP,
    CancelResult,
    Claim,
    Completed,
    EnqueueStatus,
    ErrorInfo,
    Failed,
    JobEventKind,
    NewJob,
    Released,
    Retried,
    SettleStatus,
)
from workers.storage import portions, redis_listener, rules
from workers.storage.base import Storage
from workers.storage.redis import RedisStorage

LEASES = {"*": timedelta(seconds=30)}
HOUR = timedelta(hours=1)
ERROR = ErrorInfo(type="ValueError", message="no")
PATIENCE = 10.0
BYTES_PER_JOB = 1_638  # 1.6 KiB


def job(job_id: str, **fields: Any) -> NewJob:
    return NewJob(**{"id": job_id, "name": "work", "payload": b"{}", **fields})


async def claim_one(storage: RedisStorage) -> Claim:
    [claim] = await storage.claim("w", leases=LEASES, limit=1)
    return claim


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[RedisStorage]:
    storage = RedisStorage(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url) as client:
        yield client


def key(storage: RedisStorage, name: str) -> str:
    return f"{{workers:{storage.queue}}}:{name}"


async def one_in_every_set(storage: RedisStorage) -> None:
    """Each key of the queue has something in it."""
    names = ("completed", "failed", "failing", "cancelled", "k1", "k2")
    await storage.enqueue([job(name, ordering_key="key" if name[0] == "k" else None) for name in names])
    claims = {claim.job_id: claim for claim in await storage.claim("w", leases=LEASES, limit=10)}
    await storage.settle(
        [
            Completed(claim=claims["completed"], result=b"1"),
            Failed(claim=claims["failed"], error=ERROR),
            Retried(claim=claims["failing"], delay=HOUR, error=ERROR),
            Released(claim=claims["cancelled"]),
        ]
    )
    await storage.cancel("cancelled")
    await storage.enqueue([job("scheduled", delay=HOUR)])
    await storage.wait(["work"], timeout=timedelta(0))  # which notes a sleeper
    throttled = Deduplication(key="key", mode=DeduplicationMode.THROTTLE, ttl=HOUR)
    await storage.enqueue([job("ready", name="other", deduplication=throttled)])
    await storage.pause()


SETS = (
    *("jobs", "runs", "ready", "held", "scheduled", "failing", "leases", "completed", "failed", "cancelled", "busy"),
    *("workers", "sleepers", "meta", "marks"),
)
THROTTLED = "throttled"
"""Read by none but those that have to do with keys whose time is over."""


@pytest.mark.parametrize(
    ("prefix", "queue"),
    [("workers", "plain"), ("workers", "a}b"), ("", "{"), ("}", "}"), ("{x}", "x:y"), ("a:b", "100%"), ("é", "日本語")],
)
async def test_every_key_of_a_queue_is_in_one_slot(prefix: str, queue: str, own_server: ValkeyProcess) -> None:
    """Whatever prefix and queue are called, a cluster keeps all keys on one node, and there are no others."""
    storage: Storage = RedisStorage(own_server.url, queue, prefix=prefix)
    assert isinstance(storage, RedisStorage)
    await storage.connect()
    await one_in_every_set(storage)
    async with Redis.from_url(own_server.url) as client:
        keys = [found async for found in client.scan_iter()]
    assert len({key_slot(found) for found in keys}) == 1
    assert {found.rpartition(b":")[2].decode() for found in keys} == {*SETS, THROTTLED}
    await storage.disconnect()


async def test_prefixes_and_queues_that_look_alike_share_nothing(redis_url: str) -> None:
    """A colon in a queue's name is not the end of a prefix."""
    own = uuid.uuid4().hex
    left, right = RedisStorage(redis_url, "c", prefix=f"{own}:b"), RedisStorage(redis_url, "b:c", prefix=own)
    for storage in (left, right):
        await storage.connect()
    await left.enqueue([job("a")])
    assert await right.claim("w", leases=LEASES, limit=1) == []
    for storage in (left, right):
        await storage.disconnect()


async def test_a_queued_job_of_1_kib_takes_at_most_1_6_kib(own_server: ValkeyProcess) -> None:
    """Memory of the server per job, sets and all."""
    storage = RedisStorage(own_server.url)
    await storage.connect()
    async with Redis.from_url(own_server.url) as client:
        used = []
        for _ in range(9):
            await storage.enqueue([job(str(uuid.uuid4()), payload=b"x" * 1024) for _ in range(500)])
            used.append((await client.info("memory"))["used_memory"])
    assert (used[-1] - used[0]) / 4_000 <= BYTES_PER_JOB  # the first batch paid for scripts and connections
    await storage.disconnect()


async def test_scripts_lost_by_the_server_are_sent_again(own_server: ValkeyProcess) -> None:
    """After SCRIPT FLUSH every verb works on, and repeats nothing that had run."""
    storage = RedisStorage(own_server.url)
    await storage.connect()
    async with Redis.from_url(own_server.url) as client:

        async def flushed() -> RedisStorage:
            await client.script_flush()
            return storage

        await (await flushed()).enqueue([job("a"), job("b"), job("c", delay=HOUR), job("a")])
        first, second = await (await flushed()).claim("w", leases=LEASES, limit=5)
        assert dict((await (await flushed()).renew([first, second])).lost) == {}
        ends = [Completed(claim=first, result=b"1"), Failed(claim=second, error=ERROR)]
        assert {one.status for one in await (await flushed()).settle(ends)} == {SettleStatus.APPLIED}
        assert await (await flushed()).promote(["c"]) == 1
        assert await (await flushed()).cancel("c") is CancelResult.CANCELLED
        assert await (await flushed()).retry(["b"]) == 1
        assert (await (await flushed()).counts())[JobState.QUEUED] == 1
        await (await flushed()).wait(["*"], timeout=HOUR)
    await storage.disconnect()


async def _enter(storage: RedisStorage) -> None:
    async with storage.events():
        pass


VERBS: dict[str, Callable[[RedisStorage, Claim], Awaitable[object]]] = {
    "enqueue": lambda storage, _: storage.enqueue([job("x")]),
    "wait": lambda storage, _: storage.wait(("*",), timeout=timedelta(seconds=60)),
    "claim": lambda storage, _: storage.claim("w", leases=LEASES, limit=10),
    "renew": lambda storage, claim: storage.renew([claim]),
    "settle": lambda storage, claim: storage.settle([Completed(claim=claim, result=b"1")]),
    "recover": lambda storage, _: storage.recover(10),
    "sweep": lambda storage, _: storage.sweep(10),
    "cancel": lambda storage, _: storage.cancel("a"),
    "status": lambda storage, _: storage.status(["a"]),
    "result": lambda storage, _: storage.result("a"),
    "counts": lambda storage, _: storage.counts(),
    "list": lambda storage, _: storage.list(JobState.QUEUED),
    "workers": lambda storage, _: storage.workers(),
    "pause": lambda storage, _: storage.pause(),
    "resume": lambda storage, _: storage.resume(),
    "retry": lambda storage, _: storage.retry(["a"]),
    "remove": lambda storage, _: storage.remove(["b"], running=True),
    "complete": lambda storage, _: storage.complete("b", b"1"),
    "promote": lambda storage, _: storage.promote(["b"]),
    "drain": lambda storage, _: storage.drain(),
    "clean": lambda storage, _: storage.clean(JobState.FAILED, older_than=HOUR),
    "update_result_ttl": lambda storage, _: storage.update_result_ttl("a", HOUR),
}
EVENTS: dict[str, Callable[[RedisStorage, Claim], Awaitable[object]]] = {"events": lambda storage, _: _enter(storage)}


async def test_a_dead_server_is_unavailable_and_a_new_one_is_used(own_server: ValkeyProcess) -> None:
    """Every verb says so within its time while the server is gone, and works by itself when it is back."""
    storage = RedisStorage(own_server.url, timeout=timedelta(seconds=2))
    await storage.connect()
    await _enter(storage)
    await storage.enqueue([job("a"), job("b")])
    claim = await claim_one(storage)
    own_server.kill()
    async with asyncio.timeout(PATIENCE):
        for verb in (VERBS | EVENTS).values():
            with pytest.raises(StorageUnavailable):
                await verb(storage, claim)
    own_server.start()
    for verb in (VERBS | EVENTS).values():
        await verb(storage, claim)
    await storage.disconnect()


async def test_a_wait_ends_with_its_server(own_server: ValkeyProcess) -> None:
    """A worker asleep does not sleep on when the server it would be woken by is gone."""
    storage = RedisStorage(own_server.url)
    await storage.connect()
    waiting = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    await asyncio.sleep(0.05)
    own_server.kill()
    async with asyncio.timeout(PATIENCE):
        await waiting
        with pytest.raises(StorageUnavailable):
            await storage.wait(("*",), timeout=timedelta(seconds=60))
    await storage.disconnect()


async def test_a_hanging_server_is_unavailable_in_time() -> None:
    """A server that takes connections and never answers is given up after the storage's timeout."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    storage = RedisStorage(f"redis://127.0.0.1:{port}", timeout=timedelta(milliseconds=200))
    async with server, asyncio.timeout(PATIENCE):
        with pytest.raises(StorageUnavailable):
            await storage.connect()
        server.close()


async def test_no_server_at_all() -> None:
    """A port nobody listens on is unavailable, not a bug."""
    with pytest.raises(StorageUnavailable):
        await RedisStorage(f"redis://127.0.0.1:{free_port()}").connect()


@pytest.mark.parametrize("name", SETS)
async def test_a_key_of_another_type_is_an_error_that_changes_nothing(
    name: str, storage: RedisStorage, client: Any
) -> None:
    """Every verb refuses a queue with a foreign key in it; when it is taken away, the queue is as it was."""
    await one_in_every_set(storage)
    before = await storage.counts()
    [held] = (await storage.list(JobState.PROCESSING)).jobs
    claim = Claim(
        job_id=held.id,
        name="work",
        payload=b"",
        token="0" * 28,
        worker_id="w",
        lease=HOUR,
        attempt=1,
        max_attempts=3,
        created_at=held.created_at,
        keep_completed=HOUR,
        keep_failed=HOUR,
    )
    await client.rename(key(storage, name), key(storage, "aside"))
    await client.set(key(storage, name), "foreign")
    for verb in VERBS.values():
        with pytest.raises(StorageError, match="WRONGTYPE"):
            await verb(storage, claim)
    await client.rename(key(storage, "aside"), key(storage, name))
    assert await storage.counts() == before


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x01short", b"\x02" + bytes(44), None])
async def test_a_record_that_is_not_ours_is_set_aside(damage: bytes | None, storage: RedisStorage, client: Any) -> None:
    """The job fails with a reason and keeps its bytes; its neighbours run, and no claim meets it again."""
    await storage.enqueue([job("bad"), job("good")])
    if damage is None:
        await client.hdel(key(storage, "jobs"), "bad")
    else:
        await client.hset(key(storage, "jobs"), "bad", damage)
    assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=5)] == ["good"]
    outcome = await storage.result("bad")
    assert outcome is not None
    assert outcome.error is not None
    assert outcome.error.type == "CorruptRecord"
    assert (await client.hget(key(storage, "jobs"), "bad")).endswith(damage or b"")
    assert (await storage.enqueue([job("bad")]))[0].status is EnqueueStatus.QUEUED


async def test_a_job_may_begin_as_a_later_link(storage: RedisStorage) -> None:
    """As when it is copied from another queue; which link it was outlives its payload."""
    await storage.enqueue([job("a", chain_index=1_000_000)])
    claim = await claim_one(storage)
    assert claim.chain_index == 1_000_000
    await storage.settle([Completed(claim=claim, result=b"1")])
    [status] = await storage.status(["a"])
    assert status is not None
    assert status.chain_index == 1_000_000


async def test_a_damaged_attempt_fails_no_neighbour(storage: RedisStorage, client: Any) -> None:
    """Settling it is an error with a reason, recovering it lets it go, and the others are settled."""
    await storage.enqueue([job("bad"), job("good")])
    bad, good = await storage.claim("w", leases={"*": timedelta(microseconds=1)}, limit=5)
    await client.hset(key(storage, "runs"), "bad", b"garbage")
    outcomes = await storage.settle([Completed(claim=bad, result=b"1"), Completed(claim=good, result=b"1")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]
    assert outcomes[0].detail
    assert (await storage.recover(10)).requeued == ()
    assert (await storage.counts())[JobState.PROCESSING] == 0


async def test_what_stands_in_line_by_mistake_runs_nothing(storage: RedisStorage, client: Any) -> None:
    """Foreign members, and a job that stands in line a second time, are dropped by the claim that meets them."""
    await storage.enqueue([job("a")])
    [member] = await client.zrange(key(storage, "ready"), 0, 0)
    claim = await claim_one(storage)
    await client.zadd(key(storage, "ready"), {b"\xff\xff": 0, b"foreign": 0, member: 0})
    assert await storage.claim("w", leases=LEASES, limit=5) == []
    assert await client.zcard(key(storage, "ready")) == 0
    assert [one.status for one in await storage.settle([Completed(claim=claim, result=b"")])] == [SettleStatus.APPLIED]


async def test_an_ordering_key_of_a_job_that_vanished_is_free(storage: RedisStorage, client: Any) -> None:
    """When somebody deletes a running job by hand, the other jobs of its key run on."""
    await storage.enqueue([job(name, ordering_key="key") for name in ("gone", "first", "second")])
    await claim_one(storage)
    assert await storage.claim("w", leases=LEASES, limit=5) == []
    await client.zrem(key(storage, "leases"), "gone")
    await client.hdel(key(storage, "runs"), "gone")
    await client.hdel(key(storage, "jobs"), "gone")
    await storage.enqueue([job("third", ordering_key="key")])
    claim = await claim_one(storage)
    await storage.settle([Completed(claim=claim, result=b"")])
    assert (await claim_one(storage)).job_id == "first"


async def test_a_drain_takes_what_is_not_ours(storage: RedisStorage, client: Any) -> None:
    """Foreign members of the sets are drained like jobs."""
    for name in ("ready", "held", "scheduled", "failing"):
        await client.zadd(key(storage, name), {b"\xff": 0})
    assert (await storage.list(JobState.QUEUED)).jobs == ()
    assert await storage.drain() == 4
    assert (await storage.counts())[JobState.QUEUED] == 0


async def test_a_claim_of_large_jobs_is_cut_short(storage: RedisStorage) -> None:
    """One claim brings little more than 8 MiB, the next ones the rest."""
    await storage.enqueue([job(f"large-{number}", payload=bytes(5 << 20)) for number in range(3)])
    claimed = [len(await storage.claim("w", leases=LEASES, limit=10)) for _ in range(3)]
    assert claimed == [2, 1, 0]


async def test_a_claim_of_more_than_a_script_takes_is_whole(storage: RedisStorage) -> None:
    """2 300 jobs come in one call, each with a token of its own."""
    for start in (0, 1_150):
        await storage.enqueue([job(f"job-{number:04}") for number in range(start, start + 1_150)])
    claims = await storage.claim("w", leases=LEASES, limit=5_000)
    assert [claim.job_id for claim in claims] == [f"job-{number:04}" for number in range(2_300)]
    assert len({claim.token for claim in claims}) == 2_300


async def test_a_cancelled_claim_gives_its_jobs_back(storage: RedisStorage) -> None:
    """Whenever a claim is cancelled, its jobs are claimable at once, and their attempt is not counted."""
    await storage.enqueue([job(f"job-{number}") for number in range(10)])
    for turn in range(30):
        claiming = asyncio.create_task(storage.claim("w", leases=LEASES, limit=10))
        await asyncio.sleep(0.0001 * (turn % 12))
        if claiming.cancel():
            with pytest.raises(asyncio.CancelledError):
                await claiming
        else:
            await storage.settle([Released(claim=claim) for claim in claiming.result()])
        assert (await storage.counts())[JobState.QUEUED] == 10
    claims = await storage.claim("w", leases=LEASES, limit=10)
    assert [(claim.job_id, claim.attempt) for claim in claims] == [(f"job-{number}", 1) for number in range(10)]


async def test_a_page_goes_on_where_the_last_ended(storage: RedisStorage) -> None:
    """Jobs that leave between two pages, the last one seen included, hide none of those that stay."""
    await storage.enqueue([job(f"job-{number}") for number in range(8)])
    page = await storage.list(JobState.QUEUED, limit=4)
    assert [one.id for one in page.jobs] == [f"job-{number}" for number in range(4)]
    assert await storage.remove(["job-1", "job-3", "job-5"]) == 3
    page = await storage.list(JobState.QUEUED, cursor=page.cursor, limit=4)
    assert [one.id for one in page.jobs] == ["job-4", "job-6", "job-7"]
    assert page.cursor is None
    assert (await storage.counts())[JobState.QUEUED] == 5


async def test_an_idle_wait_asks_the_server_once(own_server: ValkeyProcess) -> None:
    """While it sleeps, nothing is asked."""
    storage = RedisStorage(own_server.url)
    await storage.connect()
    await storage.wait(["*"], timeout=timedelta(milliseconds=1))
    async with Redis.from_url(own_server.url) as client:
        await client.config_resetstat()
        await storage.wait(["*"], timeout=timedelta(milliseconds=500))
        statistics = await client.info("commandstats")
    assert statistics["cmdstat_evalsha"]["calls"] == 2  # before the sleep, and at its end
    await storage.disconnect()


async def test_events_nobody_wants_are_no_longer_sent(storage: RedisStorage, client: Any) -> None:
    """After the last subscriber has left, the server is told so, and a new one hears again."""
    await _enter(storage)
    channel = key(storage, "events@0")
    assert (await client.pubsub_numsub(channel))[0][1] == 1
    await storage.enqueue([job("a")])
    async with asyncio.timeout(PATIENCE):
        while (await client.pubsub_numsub(channel))[0][1]:
            await asyncio.sleep(0.005)
    async with storage.subscribe("b") as events, asyncio.timeout(PATIENCE):
        await storage.enqueue([job("b")])
        assert (await events.get()).kind is JobEventKind.QUEUED


async def test_who_listens_for_cancel_requests_hears_no_other_events(storage: RedisStorage, client: Any) -> None:
    """The requests have a channel of their own, so that a busy queue's events are not sent to its workers."""
    await storage.enqueue([job("a")])
    await claim_one(storage)
    async with storage.cancel_requests() as requests, asyncio.timeout(PATIENCE):
        assert (await client.pubsub_numsub(key(storage, "events@0")))[0][1] == 0
        await storage.cancel("a")
        assert (await requests.get()).job_id == "a"


class DeadLine:
    """A line to a server on which nothing comes through while it is `dead`; `hung_up` once the client gave up."""

    def __init__(self, server: ValkeyProcess) -> None:
        self._server = server
        self._writers: list[asyncio.StreamWriter] = []
        self.dead = False
        self.hung_up = asyncio.Event()

    async def open(self) -> str:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._listener.close()
        for writer in self._writers:
            writer.close()
        await self._listener.wait_closed()

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writers += [back, to_server]
        answers = asyncio.create_task(self._copy(server, back))
        await self._copy(client, to_server)
        if self.dead:
            self.hung_up.set()
        answers.cancel()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 20):
            if not self.dead:
                target.write(data)


async def test_a_waiter_is_told_of_an_end_it_could_not_hear(
    own_server: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs end while a listener's line is dead: that is noticed, the line made again, and the ends told."""
    monkeypatch.setattr(redis_listener, "PING_SECONDS", 0.1)
    line = DeadLine(own_server)
    listener, storage = RedisStorage(await line.open()), RedisStorage(own_server.url)
    await listener.connect()
    await storage.connect()
    async with asyncio.timeout(PATIENCE), listener.subscribe("a") as ours, listener.subscribe("b") as others:
        line.dead = True
        await storage.enqueue([job("a"), job("b")])
        await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
        await storage.cancel("b")
        await line.hung_up.wait()
        line.dead = False
        assert (await ours.get()).kind is JobEventKind.COMPLETED
        assert (await others.get()).kind is JobEventKind.CANCELLED
    await listener.disconnect()
    await storage.disconnect()
    await line.close()


async def test_results_are_read_in_bounded_steps(storage: RedisStorage) -> None:
    """Many large results asked for at once take several answers, each caller having its own."""
    await storage.enqueue([job(f"job-{number}") for number in range(8)])
    claims = await storage.claim("w", leases=LEASES, limit=8)
    await storage.settle([Completed(claim=claim, result=claim.job_id.encode() * 100_000) for claim in claims])
    found = await asyncio.gather(*(storage.result(f"job-{number}") for number in range(10)))
    assert [end and end.result and end.result[:5] for end in found] == [b"job-%d" % at for at in range(8)] + [None] * 2


async def test_databases_of_one_server_hear_nothing_of_each_other(redis_url: str, storage: RedisStorage) -> None:
    """Pub/sub knows no databases, our channels do."""
    other = RedisStorage(redis_url.removesuffix("/0") + "/1", storage.queue)
    await other.connect()
    async with storage.events() as events, asyncio.timeout(PATIENCE):
        await other.enqueue([job("other")])
        await storage.enqueue([job("mine")])
        assert (await events.get()).job_id == "mine"
    await other.disconnect()


@pytest.mark.parametrize("text", [True, False])
async def test_a_client_lends_its_settings(text: bool, redis_url: str, client: Any) -> None:
    """Bytes or text, binary payloads pass; the client stays open, and none of its connections is used."""
    async with Redis.from_url(redis_url, decode_responses=text) as lent:
        storage = RedisStorage(lent, f"test-{uuid.uuid4().hex}")
        await storage.connect()
        await storage.enqueue([job("a", payload=b"\xff\x00")])
        assert (await claim_one(storage)).payload == b"\xff\x00"
        await storage.disconnect()
        assert lent.connection_pool.get_connection_count()[0][0] == 0
        assert await lent.ping()


def test_a_url_names_the_queue_and_is_shown_nowhere() -> None:
    """The argument wins over the URL; a password is not in the repr, nor in the error about a wrong URL."""
    assert RedisStorage("redis://:secret@127.0.0.1/0?queue=mail").queue == "mail"
    assert RedisStorage("redis://127.0.0.1/0?queue=mail", "other").queue == "other"
    assert "secret" not in repr(RedisStorage("redis://:secret@127.0.0.1/0"))
    with pytest.raises(StorageError) as caught:
        RedisStorage("http://:secret@127.0.0.1")
    assert "secret" not in str(caught.value)


def test_event_loops_one_after_another(redis_url: str) -> None:
    """One storage object serves a second event loop after the first has ended, even without a disconnect."""
    storage = RedisStorage(redis_url, f"test-{uuid.uuid4().hex}")

    async def use(*, disconnect: bool) -> None:
        await storage.connect()
        async with storage.events() as events, asyncio.timeout(PATIENCE):
            await storage.enqueue([job(uuid.uuid4().hex)])
            assert (await events.get()).kind is JobEventKind.QUEUED
        await storage.wait(("*",), timeout=timedelta(seconds=0.05))
        if disconnect:
            await storage.disconnect()

    for disconnect in (True, False, True):
        asyncio.run(use(disconnect=disconnect))


async def test_tombstones_and_worker_records_expire(storage: RedisStorage, client: Any) -> None:
    """An hour later, which their scores are made to say, a sweep leaves no key behind."""
    await storage.enqueue([job("cancelled"), job("done", keep_completed=DROP)])
    await storage.cancel("cancelled")
    await storage.settle([Completed(claim=await claim_one(storage), result=b"")])
    assert await storage.result("cancelled") is not None
    for name in ("cancelled", "workers"):
        for member, score in await client.zrange(key(storage, name), 0, -1, withscores=True):
            await client.zadd(key(storage, name), {member: score - HOUR / timedelta(microseconds=1) - 1})
    assert await storage.sweep(10) == 2
    assert await storage.result("cancelled") is None
    assert await storage.workers() == []
    assert [found async for found in client.scan_iter(key(storage, "*"))] == [key(storage, "meta").encode()]


async def test_what_no_server_takes_is_an_error(storage: RedisStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload or result beyond what Redis takes in one string is no outage; neighbours are settled."""
    monkeypatch.setattr(rules, "REDIS_VALUE_BYTES", 10)
    with pytest.raises(StorageError, match="job 'large': 11 bytes are more"):
        await storage.enqueue([job("small"), job("large", payload=bytes(11))])
    assert await storage.status(["small"]) == [None]
    await storage.enqueue([job("a"), job("b")])
    one, other = await storage.claim("w", leases=LEASES, limit=2)
    outcomes = await storage.settle([Completed(claim=one, result=bytes(11)), Completed(claim=other, result=b"")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]
    assert (await storage.settle([Completed(claim=one, result=b"1")]))[0].status is SettleStatus.APPLIED


async def test_large_batches_are_sent_in_portions(storage: RedisStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer stands in its place, however the batch was cut."""
    monkeypatch.setattr(portions, "PORTION_BYTES", 100)
    jobs = [job(f"job-{number}", payload=bytes(number * 9)) for number in range(20)]
    assert [result.id for result in await storage.enqueue(jobs)] == [one.id for one in jobs]
    claims = await storage.claim("w", leases=LEASES, limit=20)
    assert [claim.payload for claim in claims] == [one.payload for one in jobs]
    outcomes = await storage.settle([Completed(claim=claim, result=claim.payload) for claim in (*claims, claims[0])])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED] * 20 + [SettleStatus.ALREADY_APPLIED]
