"""A worker whose handlers lack what they need claims nothing until it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from tests.workers.running import Recorder, done, outcome, running
from workers import WorkerOptions
from workers.jobs import JobState, OutcomeKind
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind


class Database:
    """Something that may be away."""

    def __init__(self) -> None:
        self.back = asyncio.Event()
        self.asked = asyncio.Event()

    def not_ready(self) -> Coroutine[object, object, None] | None:
        return None if self.back.is_set() else self._wait()

    async def _wait(self) -> None:
        self.asked.set()
        await self.back.wait()


async def test_nothing_is_claimed_before_it_is_ready() -> None:
    """The job waits in the queue, and runs once it may."""
    storage, database = MemoryStorage(), Database()
    await steps.enqueue(storage, steps.job("one"))
    async with running(Worker(storage, {"work": done}, options=WorkerOptions(not_ready=database.not_ready))):
        async with asyncio.timeout(PATIENCE):
            await database.asked.wait()
        [waiting] = await storage.status(["one"])
        assert waiting is not None
        assert waiting.state is JobState.QUEUED
        database.back.set()
        assert (await outcome(storage, "one")).kind is OutcomeKind.COMPLETED


async def test_a_stop_does_not_wait_until_it_is_ready() -> None:
    """The worker stops at once, whatever is away."""
    storage, database = MemoryStorage(), Database()
    async with running(Worker(storage, {"work": done}, options=WorkerOptions(not_ready=database.not_ready))):
        async with asyncio.timeout(PATIENCE):
            await database.asked.wait()
    assert not database.back.is_set()


@pytest.mark.parametrize("at_once", [True, False], ids=["when it is asked", "while it is awaited"])
async def test_a_check_that_raises_does_not_end_the_worker(at_once: bool) -> None:
    """It is reported, and asked again a little later; jobs that ended meanwhile are settled."""
    storage, recorder, asked = MemoryStorage(), Recorder(), 0

    async def broken() -> None:
        raise OSError("no such flag")

    def not_ready() -> Coroutine[object, object, None] | None:
        nonlocal asked
        asked += 1
        if asked > 2:
            return None
        if at_once:
            raise OSError("no such flag")
        return broken()

    await steps.enqueue(storage, steps.job("one"))
    options = WorkerOptions(not_ready=not_ready)
    async with running(Worker(storage, {"work": done}, observers=[recorder], options=options)):
        assert (await outcome(storage, "one")).kind is OutcomeKind.COMPLETED
    assert [str(event.error) for event in recorder.of(Kind.ERROR)] == ["no such flag"] * 2
