"""The storages the conformance suite runs over: one entry each."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from tests.servers import ValkeyProcess, valkey
from workers.clock import ManualClock
from workers.storage.base import Limits, Storage
from workers.storage.bullmq import BullMQStorage
from workers.storage.file import FileStorage
from workers.storage.redis import RedisStorage
from workers.storage.sql import SqlStorage
from workers.testing import Case, Harness, MemoryHarness
from workers.testing.case import RESTARTS

OpenHarness: TypeAlias = Callable[[Case, pytest.FixtureRequest], AbstractAsyncContextManager[Harness]]


class SqliteHarness(Harness):
    """`SqlStorage` on a fresh SQLite file, on a clock the cases move."""

    moment = timedelta(seconds=1)
    moves_time = True

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._url = f"sqlite:///{file}"
        self._clock = ManualClock()

    @property
    def limits(self) -> Limits:
        return SqlStorage(self._url).limits

    async def make(self, queue: str) -> Storage:
        return SqlStorage(self._url, queue, clock=self._clock)

    async def migrate(self) -> None:
        await SqlStorage(self._url).migrate()

    def now(self) -> datetime:
        return self._clock.now()

    async def advance(self, by: timedelta) -> None:
        self._clock.advance(by)


class PostgresHarness(Harness):
    """`SqlStorage` on a fresh PostgreSQL database, in real time, with leases of 150 ms."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @property
    def limits(self) -> Limits:
        return SqlStorage(self._url).limits

    async def make(self, queue: str) -> Storage:
        return SqlStorage(self._url, queue)


class FileHarness(Harness):
    """`FileStorage` on a fresh directory, on a clock the cases move."""

    moment = timedelta(seconds=1)
    moves_time = True

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory
        self._clock = ManualClock()

    @property
    def limits(self) -> Limits:
        return FileStorage.limits

    async def make(self, queue: str) -> Storage:
        return FileStorage(self._directory, queue, clock=self._clock)

    def now(self) -> datetime:
        return self._clock.now()

    async def advance(self, by: timedelta) -> None:
        self._clock.advance(by)


class BullMQHarness(Harness):
    """`BullMQStorage` on a real server in real time, with leases of 150 ms."""

    def __init__(self, url: str, server: ValkeyProcess | None = None) -> None:
        super().__init__()
        self._url = url
        self._server = server
        self.restarts = server is not None

    @property
    def limits(self) -> Limits:
        return BullMQStorage.limits

    async def make(self, queue: str) -> Storage:
        return BullMQStorage(self._url, queue)

    async def restart_server(self) -> None:
        assert self._server is not None
        self._server.restart()


class RedisHarness(BullMQHarness):
    """`RedisStorage` on a real server in real time."""

    @property
    def limits(self) -> Limits:
        return RedisStorage.limits

    async def make(self, queue: str) -> Storage:
        return RedisStorage(self._url, queue)


@asynccontextmanager
async def memory(case: Case, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    async with MemoryHarness() as harness:
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
    """On a database of the case's own."""
    url = request.getfixturevalue("postgres_url")
    await SqlStorage(url).migrate()
    async with PostgresHarness(url) as harness:
        yield harness


def on_a_server(make: Callable[[str, ValkeyProcess | None], Harness]) -> OpenHarness:
    """On the run's shared server; a case that restarts servers gets one of its own."""

    @asynccontextmanager
    async def opened(case: Case, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(valkey()) if RESTARTS in case.needs else None
            url = own.url if own else request.getfixturevalue("redis_url")
            async with make(url, own) as harness:
                yield harness

    return opened


HARNESSES: Final[dict[str, OpenHarness]] = {
    "memory": memory,
    "file": file,
    "sqlite": sqlite,
    "postgres": postgres,
    "redis": on_a_server(RedisHarness),
    "bullmq": on_a_server(BullMQHarness),
}
