"""A run that takes too long: by its handler's timeout, or by its job's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.workers.running import AT_ONCE, Recorder, done, forever, outcome, running
from workers import WorkerOptions
from workers.jobs import Claim, OutcomeKind
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Handler, Job


async def test_a_handler_that_takes_too_long_is_retried() -> None:
    """Past its timeout the handler is cancelled, and the attempt counts as failed with `HandlerTimeout`."""
    storage, recorder = MemoryStorage(), Recorder()
    cancelled = asyncio.Event()

    async def slow(job: Job) -> None:
        try:
            await forever(job)
        finally:
            cancelled.set()

    await steps.enqueue(storage, steps.job("job", max_attempts=2))
    handler = Handler(slow, timeout=timedelta(milliseconds=20))
    async with running(Worker(storage, {"work": handler}, observers=[recorder], options=WorkerOptions(retry=AT_ONCE))):
        ended = await outcome(storage, "job")
    assert cancelled.is_set()
    assert ended.error is not None
    assert (ended.error.type, ended.error.exhausted) == ("HandlerTimeout", True)
    assert "0:00:00.020000" in ended.error.message
    assert Kind.FAILING in recorder.story("job")


class Bounded(MemoryStorage):
    """Its jobs have a bound on each run."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        claims = await super().claim(worker_id, leases=leases, limit=limit)
        return [replace(one, timeout=self._timeout) for one in claims]


SHORT, LONG = timedelta(milliseconds=20), timedelta(hours=1)


@pytest.mark.parametrize(
    ("jobs_own", "handlers_own", "why"),
    [
        (SHORT, None, "operation timed out"),
        (SHORT, LONG, "operation timed out"),
        (SHORT, SHORT, "operation timed out"),
        (LONG, SHORT, "the handler ran longer than 0:00:00.020000"),
    ],
    ids=["the job's alone", "the job's", "both", "the handler's"],
)
async def test_the_lesser_timeout_counts(jobs_own: timedelta, handlers_own: timedelta | None, why: str) -> None:
    """A run ends by the job's own bound or the handler's, whichever is over first, and is one more attempt."""
    storage, recorder = Bounded(jobs_own), Recorder()
    await steps.enqueue(storage, steps.job("job", max_attempts=2))
    worker = Worker(
        storage,
        {"work": Handler(forever, timeout=handlers_own)},
        observers=[recorder],
        options=WorkerOptions(retry=AT_ONCE),
    )
    async with running(worker):
        ended = await outcome(storage, "job")
    assert ended.error is not None
    assert (ended.error.type, ended.error.message, ended.error.exhausted) == ("HandlerTimeout", why, True)
    assert recorder.story("job").count(Kind.FAILING) == 1


async def test_a_run_within_its_jobs_timeout_ends_as_it_does() -> None:
    """One completes, and a `TimeoutError` that another raises is its own."""
    storage = Bounded(LONG)
    await steps.enqueue(storage, steps.job("good"), steps.job("bad", name="bad", max_attempts=1))

    async def impatient(job: Job) -> None:
        raise TimeoutError("a peer's")

    async with running(Worker(storage, {"work": done, "bad": impatient})):
        assert (await outcome(storage, "good")).kind is OutcomeKind.COMPLETED
        ended = await outcome(storage, "bad")
    assert ended.error is not None
    assert (ended.error.type, ended.error.message) == ("TimeoutError", "a peer's")


async def test_a_handlers_own_timeout_is_its_own() -> None:
    """A `TimeoutError` the handler met is not taken for the worker's timeout."""
    storage = MemoryStorage()

    async def impatient(job: Job) -> None:
        async with asyncio.timeout(0.01):
            await forever(job)

    await steps.enqueue(storage, steps.job("job", max_attempts=1))
    handler = Handler(impatient, timeout=timedelta(hours=1))
    async with running(Worker(storage, {"work": handler})):
        ended = await outcome(storage, "job")
    assert ended.error is not None
    assert ended.error.type == "TimeoutError"
