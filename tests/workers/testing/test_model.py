"""Storages and the transition table, driven side by side by calls nobody thought of."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from redis.asyncio import Redis

from tests.workers.harnesses import FileHarness, RedisHarness, SqliteHarness
from tests.workers.testing import broken_storages as broken
from workers.clock import ManualClock
from workers.storage.base import Capabilities, Storage
from workers.storage.bull import BullStorage
from workers.storage.bull import scripts as bull_lua
from workers.storage.memory import MemoryStorage
from workers.storage.on_redis.scripts import Script
from workers.storage.redis import scripts as redis_lua
from workers.testing import Harness, MemoryHarness
from workers.testing.expected import ExpectedJob
from workers.testing.model import StorageMachine

QUICK = settings(
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
FAR_TO_FIND = pytest.mark.full
"""Takes hundreds of examples, more than any storage is given here: only that the machine can, not that a run does."""


class OwnSqlite(SqliteHarness):
    """On a file of its own, gone with the harness."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fd-model-")
        super().__init__(Path(self._directory.name) / "queue.db")

    async def __aenter__(self) -> Self:
        await self.migrate()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._directory.cleanup()


class OwnDirectory(FileHarness):
    """In a directory of its own, gone with the harness."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="fd-model-")
        super().__init__(self._place.name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._place.cleanup()


CLOCK: Final = f"clock-{uuid.uuid4().hex}"
"""The key with the time that the scripts of `ClockedRedis` go by."""


class ClockedRedis(RedisHarness):
    """`RedisStorage` whose scripts take the time from a key, which is set by hand, and not from the server.

    Places in line grow by a microsecond with each job, so deadlines lie a little behind the clock that made them; the
    clock makes up for it whenever it moves.
    """

    moves_time = True
    clock_slack = timedelta(milliseconds=500)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._manual = ManualClock()
        self._admin = Redis.from_url(url)

    async def __aenter__(self) -> Self:
        await self.advance(timedelta(0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        await self._admin.delete(CLOCK)
        await self._admin.aclose()

    def now(self) -> datetime:
        return self._manual.now()

    async def advance(self, by: timedelta) -> None:
        self._manual.advance(by + timedelta(milliseconds=1))
        seconds, fraction = divmod(self.now().timestamp(), 1)
        await self._admin.hset(CLOCK, mapping={"s": int(seconds), "us": int(fraction * 1_000_000)})


class ClockedBull(ClockedRedis):
    """`BullStorage` on such a clock; what is left of its locks, which are the server's, goes by it too."""

    @property
    def capabilities(self) -> Capabilities:
        return BullStorage.capabilities

    async def make(self, queue: str) -> Storage:
        return BullStorage(self._url, queue)

    async def advance(self, by: timedelta) -> None:
        await super().advance(by)
        async for lock in self._admin.scan_iter("bull:case-*:lock"):
            left = timedelta(milliseconds=await self._admin.pttl(lock)) - by
            if left > timedelta(0):
                await self._admin.pexpire(lock, left)
            else:
                await self._admin.delete(lock)


def clocked(script: Script) -> Script:
    """The script, asking `CLOCK` for the time."""
    text = script.text.replace("redis.call('TIME')", f"redis.call('HMGET', '{CLOCK}', 's', 'us')")
    assert text != script.text
    return replace(script, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


class MemoryMachine(StorageMachine):
    def open_harness(self) -> Harness:
        return MemoryHarness()


class SqliteMachine(StorageMachine):
    def open_harness(self) -> Harness:
        return OwnSqlite()


class FileMachine(StorageMachine):
    def open_harness(self) -> Harness:
        return OwnDirectory()


@pytest.mark.parametrize(("machine", "examples"), [(MemoryMachine, 60), (SqliteMachine, 25)])
def test_the_storage_follows_the_table(machine: type[StorageMachine], examples: int) -> None:
    """States, counts, attempts, tokens, results and order are those of the table after every call."""
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=examples))


def test_files_follow_the_table() -> None:
    """In fewer examples: every step waits for the disk."""
    run_state_machine_as_test(FileMachine, settings=settings(QUICK, max_examples=20, phases=[Phase.generate]))


def test_redis_follows_the_table(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do the scripts of Redis, on a clock that is moved by hand."""
    ours = {name: clocked(script) for name, script in redis_lua.scripts().items()}
    monkeypatch.setattr(redis_lua, "scripts", lambda: ours)

    class RedisMachine(StorageMachine):
        def open_harness(self) -> Harness:
            return ClockedRedis(redis_url)

    # Shrinking what fails would take longer than a test may.
    run_state_machine_as_test(RedisMachine, settings=settings(QUICK, max_examples=25, phases=[Phase.generate]))


def test_bull_follows_the_table(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the order and the names of what is claimed, which Bull cannot keep. Fewer examples, as one takes long."""
    ours = {name: clocked(script) for name, script in bull_lua.scripts().items()}
    monkeypatch.setattr(bull_lua, "scripts", lambda: ours)
    monkeypatch.setattr(ExpectedJob, "must_precede", lambda self, other: False)

    class BullMachine(StorageMachine):
        def open_harness(self) -> Harness:
            return ClockedBull(redis_url)

        def claim(self, worker: str, names: Sequence[str], lease: timedelta, limit: int) -> None:
            super().claim(worker, sorted({*names, "*"}), lease, limit)

    run_state_machine_as_test(BullMachine, settings=settings(QUICK, max_examples=10, phases=[Phase.generate]))


WRONG_ABOUT_JOBS: Final = (
    pytest.param(broken.NoTokenCheck, marks=FAR_TO_FIND),
    broken.AttemptCountedAtTheEnd,
    broken.CancelIgnoredWhileScheduled,
    pytest.param(broken.ReleasedToTheEnd, marks=FAR_TO_FIND),
    broken.OldGenerationLingers,
    broken.ContinuedWithOldAttempts,
    broken.RepeatsAreLost,
    pytest.param(broken.CancelStrands, marks=FAR_TO_FIND),
    pytest.param(broken.KeyKeptByTheClaim, marks=FAR_TO_FIND),
    pytest.param(broken.KeyOfNobody, marks=FAR_TO_FIND),
    broken.FirstPayloadStays,
    broken.GroupsAreSplit,
)
WRONG_ABOUT_KEYS: Final = (
    broken.CronReplacedByAnybody,
    broken.CronJobsOfTheLate,
    broken.TokenNotTaken,
    pytest.param(broken.PlaceOfTheLost, marks=FAR_TO_FIND),
    broken.ParkedForgotten,
    pytest.param(broken.OpeningForgotten, marks=FAR_TO_FIND),
    pytest.param(broken.ChangedLimitUnseen, marks=FAR_TO_FIND),
    pytest.param(broken.FairKeysInOrder, marks=FAR_TO_FIND),
)


@pytest.mark.parametrize("kind", WRONG_ABOUT_JOBS)
def test_the_machine_finds_what_is_wrong(kind: type[MemoryStorage]) -> None:
    """A storage that is wrong in one way is found out without anybody having thought of the case."""
    find_out(kind, theme="jobs")


@pytest.mark.parametrize("kind", WRONG_ABOUT_KEYS)
def test_the_machine_finds_what_is_wrong_about_limits_turns_and_crons(kind: type[MemoryStorage]) -> None:
    """So is one that lets too many jobs start, forgets some, or lets the same time recur twice."""
    find_out(kind, theme="keys")


def find_out(kind: type[MemoryStorage], *, theme: str) -> None:
    class BrokenHarness(MemoryHarness):
        async def make(self, queue: str) -> Storage:
            return kind(self.space, queue)

    @seed(1)  # any finds them out; by this one, none takes more than fifty examples
    class BrokenMachine(StorageMachine):
        themes = (theme,)

        def open_harness(self) -> Harness:
            return BrokenHarness()

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            BrokenMachine, settings=settings(QUICK, max_examples=2_000, phases=[Phase.generate], print_blob=False)
        )
