"""The BullMQ storage on servers that lose scripts, restart, die, hang or are asked too much at once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio import Redis

from tests.servers import ValkeyProcess
from tests.workers.storage.bullmq.steps import ERROR, LEASES, SHORT, all_blocked
from workers import JobState, StorageError, StorageUnavailable
from workers.errors import StorageFull, WorkersError
from workers.jobs import (
    CancelResult,
    Claim,
    Completed,
    EnqueueStatus,
    Failed,
    JobEventKind,
    Released,
    Retried,
    Settlement,
    SettleStatus,
)
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq.claims import CLAIMED_AT_ONCE
from workers.storage.bullmq.lua_files import scripts
from workers.storage.bullmq.server import translate
from workers.testing.steps import PATIENCE, claim_one, job, until


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
    "farewell": lambda storage, _: storage.farewell("gone"),
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
    async with Redis.from_url(own_server.url, decode_responses=True) as client:
        await until(lambda: all_blocked(client, 1))
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
    """What the first step of a large claim brought is handed out although the connection broke in the second."""
    verdicts = iter(["pass", "cut", "pass"])
    claiming = [scripts()[name].sha.encode() for name in ("claimMany", "exchange")]

    def judge(request: bytes) -> str:
        return next(verdicts) if any(script in request for script in claiming) else "pass"

    async with Line(own_server, judge) as url:
        storage = BullMQStorage(url)
        await storage.connect()
        await storage.enqueue([*(job() for _ in range(CLAIMED_AT_ONCE)), job("last")])
        assert len(await storage.claim("w", leases=LEASES, limit=CLAIMED_AT_ONCE + 1)) == CLAIMED_AT_ONCE
        assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=2)] == ["last"]
        await storage.disconnect()


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
            await storage.wait(("*",), timeout=timedelta(seconds=0.05))
            await asyncio.gather(*(storage.counts() for _ in range(10)))
        if disconnect:
            await storage.disconnect()

    for disconnect in (True, False, True):
        asyncio.run(use(disconnect=disconnect))


async def test_a_subscription_outlives_its_server(own_server: ValkeyProcess) -> None:
    """Events go on where they stopped, without the subscriber's help."""
    storage = BullMQStorage(own_server.url)
    await storage.connect()
    async with storage.subscribe("a") as events, asyncio.timeout(PATIENCE):
        await asyncio.to_thread(own_server.restart)
        await storage.enqueue([job("a")])
        assert (await events.get()).kind is JobEventKind.QUEUED
    await storage.disconnect()


STOPPED = "Error running script (call to f_1): @user_script:7: @user_script: 7: "
"""What a server before Redis 7 says of an error within a script, as redis-py tells it."""


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (redis.exceptions.ConnectionError("Connection refused"), StorageUnavailable),
        (redis.exceptions.TimeoutError("Timeout"), StorageUnavailable),
        (redis.exceptions.BusyLoadingError("loading"), StorageUnavailable),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), StorageUnavailable),
        (redis.exceptions.OutOfMemoryError("command not allowed"), StorageFull),
        (redis.exceptions.ResponseError(f"{STOPPED}-OOM command not allowed when used memory"), StorageFull),
        (redis.exceptions.ResponseError(f"ERR {STOPPED}-OOM command not allowed when used memory"), StorageFull),
        (redis.exceptions.ResponseError("@user_script: 7: -OOM command not allowed"), StorageFull),  # as it caught it
        (redis.exceptions.ResponseError(f"{STOPPED}-READONLY You can't write"), StorageUnavailable),
        (redis.exceptions.ResponseError(f"{STOPPED}-MISCONF Errors writing to disk"), StorageUnavailable),
        (redis.exceptions.ResponseError(f"{STOPPED}-NOREPLICAS Not enough good replicas"), StorageUnavailable),
        (redis.exceptions.ResponseError(f"{STOPPED}The user can't run this command"), StorageError),
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
