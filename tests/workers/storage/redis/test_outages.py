"""Servers that die, hang, forget or go unheard: every verb says so, and all works on when they are back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from redis.asyncio import Redis

from tests.servers import ValkeyProcess
from tests.workers.storage.redis.steps import ERROR, LEASES, VERBS, enter, key
from workers import JobState, StorageUnavailable
from workers.jobs import (
    CancelResult,
    Claim,
    Completed,
    Failed,
    JobEventKind,
    SettleStatus,
)
from workers.storage.on_redis import subscribers as redis_listener
from workers.storage.redis import RedisStorage
from workers.testing.steps import HOUR, PATIENCE, claim_one, job, until

EVENTS: dict[str, Callable[[RedisStorage, Claim], Awaitable[object]]] = {"events": lambda storage, _: enter(storage)}


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


async def test_a_dead_server_is_unavailable_and_a_new_one_is_used(own_server: ValkeyProcess) -> None:
    """Every verb says so within its time while the server is gone, and works by itself when it is back."""
    storage = RedisStorage(own_server.url, timeout=timedelta(seconds=2))
    await storage.connect()
    await enter(storage)
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
    async with Redis.from_url(own_server.url) as client:
        await until(lambda: client.exists(key(storage, "sleepers")))
    own_server.kill()
    async with asyncio.timeout(PATIENCE):
        await waiting
        with pytest.raises(StorageUnavailable):
            await storage.wait(("*",), timeout=timedelta(seconds=60))
    await storage.disconnect()


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
