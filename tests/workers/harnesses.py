"""The storages the conformance suite runs over: one entry each."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, TypeAlias

import psycopg
import pytest
from redis.asyncio import Redis
from sqlalchemy import create_engine, inspect, text

from tests.relay import Relay
from tests.servers import PostgresProcess, ValkeyProcess, valkey
from workers.clock import ManualClock
from workers.storage.base import Capabilities, Storage
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.file import FileStorage
from workers.storage.redis import RedisStorage
from workers.storage.sql import SqlStorage
from workers.testing import Case, Harness, MemoryHarness
from workers.testing.case import FILLS, FREEZES, RESTARTS, SWALLOWS

OpenHarness: TypeAlias = Callable[[Case, pytest.FixtureRequest], AbstractAsyncContextManager[Harness]]


class SqliteHarness(Harness):
    """`SqlStorage` on a fresh SQLite file, on a clock the cases move."""

    moment = timedelta(seconds=1)
    moves_time = True
    measures = True

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._url = f"sqlite:///{file}"
        self._clock = ManualClock()

    @property
    def capabilities(self) -> Capabilities:
        return SqlStorage(self._url).capabilities

    async def make(self, queue: str) -> Storage:
        return SqlStorage(self._url, queue, clock=self._clock)

    async def migrate(self) -> None:
        await SqlStorage(self._url).migrate()

    def now(self) -> datetime:
        return self._clock.now()

    async def advance(self, by: timedelta) -> None:
        self._clock.advance(by)

    async def entries(self, storage: Storage) -> int:
        return rows(self._url)


class _OnServer(Harness):
    """Of a storage on a server, which may be its own; `relay` stands between it and the clients."""

    def __init__(
        self, url: str, server: PostgresProcess | ValkeyProcess | None = None, relay: Relay | None = None
    ) -> None:
        super().__init__()
        self._url = url
        self._server = server
        self._relay = relay
        self.restarts = self.freezes = server is not None
        self.swallows = relay is not None

    @property
    def clients_url(self) -> str:
        """Where clients reach the server."""
        return self._relay.url if self._relay else self._url

    async def freeze_server(self) -> None:
        assert self._server is not None
        self._server.hang()

    async def thaw_server(self) -> None:
        assert self._server is not None
        self._server.thaw()

    async def swallow(self) -> None:
        assert self._relay is not None
        self._relay.swallow()

    async def swallow_answers(self, over: int | None) -> None:
        assert self._relay is not None
        self._relay.stops_at = over


class PostgresHarness(_OnServer):
    """`SqlStorage` on a fresh PostgreSQL database, in real time, with leases of 150 ms."""

    cuts = True
    measures = True

    @property
    def capabilities(self) -> Capabilities:
        return SqlStorage(self._url).capabilities

    async def make(self, queue: str) -> Storage:
        return SqlStorage(self.clients_url, queue)

    async def restart_server(self) -> None:
        assert self._server is not None
        await asyncio.to_thread(self._server.stop)
        await asyncio.to_thread(self._server.start)

    async def cut_connections(self) -> None:
        with psycopg.connect(self._url.replace("+psycopg", ""), autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    async def entries(self, storage: Storage) -> int:
        return rows(self._url)


class MeasuredMemory(MemoryHarness):
    """`MemoryStorage`, of which the cases see how much it holds."""

    measures = True

    async def entries(self, storage: Storage) -> int:
        return held_in_memory(storage)


class FileHarness(Harness):
    """`FileStorage` on a fresh directory, on a clock the cases move."""

    moment = timedelta(seconds=1)
    moves_time = True
    measures = True

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory
        self._clock = ManualClock()

    @property
    def capabilities(self) -> Capabilities:
        return FileStorage.capabilities

    async def make(self, queue: str) -> Storage:
        return FileStorage(self._directory, queue, clock=self._clock)

    def now(self) -> datetime:
        return self._clock.now()

    async def advance(self, by: timedelta) -> None:
        self._clock.advance(by)

    async def entries(self, storage: Storage) -> int:
        return held_in_memory(storage)


class BullMQHarness(_OnServer):
    """`BullMQStorage` on a real server in real time, with leases of 150 ms."""

    cuts = True
    measures = True

    def __init__(self, url: str, server: ValkeyProcess | None = None, relay: Relay | None = None) -> None:
        super().__init__(url, server, relay)
        self.fills = server is not None

    @property
    def capabilities(self) -> Capabilities:
        return BullMQStorage.capabilities

    async def make(self, queue: str) -> Storage:
        return BullMQStorage(self.clients_url, queue)

    async def restart_server(self) -> None:
        assert self._server is not None
        self._server.restart()

    async def cut_connections(self) -> None:
        async with Redis.from_url(self._url) as admin:
            await admin.script_flush()
            for kind in ("normal", "pubsub"):
                await admin.client_kill_filter(_type=kind, skipme=True)

    async def fill(self) -> None:
        async with Redis.from_url(self._url) as admin:
            await admin.config_set("maxmemory", 1)

    async def make_room(self) -> None:
        async with Redis.from_url(self._url) as admin:
            await admin.config_set("maxmemory", 0)

    async def entries(self, storage: Storage) -> int:
        async with Redis.from_url(self._url) as admin:
            keys = [key async for key in admin.scan_iter(f"*{storage.queue}*", count=10_000)]
            return sum([await members(admin, key) for key in keys])


class RedisHarness(BullMQHarness):
    """`RedisStorage` on a real server in real time."""

    @property
    def capabilities(self) -> Capabilities:
        return RedisStorage.capabilities

    async def make(self, queue: str) -> Storage:
        return RedisStorage(self.clients_url, queue)


class BullHarness(BullMQHarness):
    """`BullStorage` on a real server in real time, with nobody of Node beside it."""

    @property
    def capabilities(self) -> Capabilities:
        return BullStorage.capabilities

    async def make(self, queue: str) -> Storage:
        return BullStorage(self.clients_url, queue)


def held_in_memory(storage: object) -> int:
    """How many elements are in all containers of the storage's own objects."""
    seen: dict[int, object] = {}
    found, left = 0, [storage]
    while left:
        thing = left.pop()
        ours = type(thing).__module__.startswith("workers.")
        if id(thing) in seen or not (ours or isinstance(thing, (dict, list, set, deque))):
            continue
        seen[id(thing)] = thing
        found += len(thing) if isinstance(thing, (dict, list, set, deque)) else 0
        left += gc.get_referents(thing)
    return found


def rows(url: str) -> int:
    """How many rows are in all tables of the storage."""
    engine = create_engine(url)
    with engine.connect() as connection:
        tables = [name for name in inspect(engine).get_table_names() if name.startswith("workers_")]
        found = sum(connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in tables)
    engine.dispose()
    return found


async def members(client: Redis, key: bytes) -> int:
    """How much is behind a key; a stream counts once, it is trimmed by its writer."""
    kind = await client.type(key)
    sizes = {b"hash": client.hlen, b"list": client.llen, b"set": client.scard, b"zset": client.zcard}
    return 1 + await sizes[kind](key) if kind in sizes else 1


@asynccontextmanager
async def memory(case: Case, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    async with MeasuredMemory() as harness:
        yield harness


@asynccontextmanager
async def file(case: Case, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    with tempfile.TemporaryDirectory(prefix="fd-file-") as directory:
        async with FileHarness(directory) as harness:
            yield harness


@asynccontextmanager
async def sqlite(case: Case, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    with tempfile.TemporaryDirectory(prefix="fd-sqlite-") as directory:
        async with SqliteHarness(Path(directory) / "queue.db") as harness:
            await harness.migrate()
            yield harness


@asynccontextmanager
async def postgres(case: Case, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """On an emptied database; a case that restarts servers uses the one that is there to be restarted."""
    own = request.getfixturevalue("restartable_postgres") if {RESTARTS, FREEZES} & {*case.needs} else None
    if own:
        await SqlStorage(own.url).migrate()
    url = own.url if own else request.getfixturevalue("emptied_postgres_url")
    async with relayed(case, url) as relay, PostgresHarness(url, own, relay) as harness:
        yield harness


@asynccontextmanager
async def relayed(case: Case, url: str) -> AsyncIterator[Relay | None]:
    """A relay to that server, for a case that needs one."""
    if SWALLOWS not in case.needs:
        yield None
        return
    async with Relay(url) as relay:
        yield relay


def on_a_server(make: Callable[[str, ValkeyProcess | None, Relay | None], Harness]) -> OpenHarness:
    """On the run's shared server; a case that restarts servers gets one of its own."""

    @asynccontextmanager
    async def opened(case: Case, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(valkey()) if {RESTARTS, FILLS, FREEZES} & {*case.needs} else None
            url = own.url if own else request.getfixturevalue("redis_url")
            async with relayed(case, url) as relay, make(url, own, relay) as harness:
                yield harness

    return opened


HARNESSES: Final[dict[str, OpenHarness]] = {
    "memory": memory,
    "file": file,
    "sqlite": sqlite,
    "postgres": postgres,
    "redis": on_a_server(RedisHarness),
    "bullmq": on_a_server(BullMQHarness),
    "bull": on_a_server(BullHarness),
}
