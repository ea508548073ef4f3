"""Storages and the transition table, driven side by side by calls nobody thought of."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.workers import broken_storages as broken
from tests.workers.harnesses import SqliteHarness
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.testing import Harness, MemoryHarness
from workers.testing.model import StorageMachine

QUICK = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class FileHarness(SqliteHarness):
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


class MemoryMachine(StorageMachine):
    def open_harness(self) -> Harness:
        return MemoryHarness()


class SqliteMachine(StorageMachine):
    def open_harness(self) -> Harness:
        return FileHarness()


@pytest.mark.parametrize("machine", [MemoryMachine, SqliteMachine])
def test_the_storage_follows_the_table(machine: type[StorageMachine]) -> None:
    """States, counts, attempts, tokens, results and order are those of the table after every call."""
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.parametrize(
    "kind",
    [
        broken.NoTokenCheck,
        broken.AttemptCountedAtTheEnd,
        broken.CancelIgnoredWhileScheduled,
        broken.ReleasedToTheEnd,
        broken.OldGenerationLingers,
        broken.ContinuedWithOldAttempts,
        broken.RepeatsAreLost,
    ],
)
def test_the_machine_finds_what_is_wrong(kind: type[MemoryStorage]) -> None:
    """A storage that is wrong in one way is found out without anybody having thought of the case."""

    class BrokenHarness(MemoryHarness):
        async def make(self, queue: str) -> Storage:
            return kind(self.space, queue)

    class BrokenMachine(StorageMachine):
        def open_harness(self) -> Harness:
            return BrokenHarness()

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            BrokenMachine, settings=settings(QUICK, max_examples=2_000, phases=[Phase.generate], print_blob=False)
        )
