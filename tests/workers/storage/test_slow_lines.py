"""Servers on Redis behind a slow line: what counts is how long they are silent, not how long they take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.relay import Relay
from tests.workers.running import running
from workers.jobs import JobState
from workers.storage.base import Storage
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.redis import RedisStorage
from workers.testing.steps import enqueue, job, status
from workers.worker import Worker
from workers.worker.exchanges import Appetite
from workers.worker.handlers import Job

SILENCE: Final = timedelta(seconds=1)
PACE: Final = 1_000_000
LARGE: Final = 3_000_000
"""It takes three times as long as the server may be silent."""

STORAGES: Final[dict[str, Callable[[str], Storage]]] = {
    "redis": lambda url: RedisStorage(url, "slow-redis", timeout=SILENCE),
    "bullmq": lambda url: BullMQStorage(url, "slow-bullmq", timeout=SILENCE),
    "bull": lambda url: BullStorage(url, "slow-bull", timeout=SILENCE),
}


@pytest.mark.parametrize("kind", STORAGES)
async def test_large_jobs_run_at_their_first_attempt(kind: str, redis_url: str) -> None:
    """Several are claimed at once, whose answer takes some seconds."""
    attempts: list[int] = []

    async def handler(job: Job) -> None:
        attempts.append(job.attempt)

    near = STORAGES[kind](redis_url)
    await near.connect()
    names = ["job-a", "job-b"]
    for name in names:
        await enqueue(near, job(name, payload=b'"' + b"x" * LARGE + b'"'))
    async with Relay(redis_url, pace=PACE) as relay:
        worker = Worker(STORAGES[kind](relay.url), {"*": handler}, concurrency=2)
        async with running(worker), asyncio.timeout(PATIENCE_SECONDS):
            while {(await status(near, name)).state for name in names} != {JobState.COMPLETED}:
                await asyncio.sleep(0.1)
    assert attempts == [1, 1]
    await near.disconnect()


def test_who_could_not_read_an_answer_asks_for_less() -> None:
    """By half each time, at least for one; and for one more each time that an answer of that size arrived."""
    appetite = Appetite()
    assert appetite.of(10) == 10
    appetite.was_lost(10)
    assert appetite.of(10) == 5
    for _ in range(3):
        appetite.was_lost(appetite.of(10))
    assert appetite.of(10) == 1
    appetite.was_read(1)
    appetite.was_read(1)
    assert appetite.of(10) == 2
