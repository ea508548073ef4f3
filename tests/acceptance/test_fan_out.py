"""A fan-out whose process is killed: every server gets its delivery once, or none does."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import func, select
from sqlmodel import col

from db import DeliveryJob, DeliveryPayload
from federation.base.queues.queue import DELIVERY_QUEUE_NAME
from federation.base.settings.settings import Settings
from federation.delivery.outbox.sweeper import OutboxSweeper
from federation.runtime.composition import Federation
from tests import warm
from tests.federation.protocol.vectors import A
from tests.patience import LONG_PATIENCE_SECONDS, PATIENCE_SECONDS, eventually

JOINED_RECIPIENTS = 5_000


@pytest.fixture
def environment(database_file: Path) -> dict[str, str]:
    """Settings of a node whose queues lie in its database."""
    return {
        "BETTER_AUTH_URL": "https://a.example",
        **A.env,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }


@pytest.fixture
def bullmq_environment(environment: dict[str, str], redis_url: str, queue_prefix: str) -> dict[str, str]:
    """The same with the queues on BullMQ."""
    return {**environment, "REDIS_URL": redis_url, "FEDERATION_QUEUE_PREFIX": queue_prefix}


@pytest.fixture
async def bullmq_node(bullmq_environment: dict[str, str]) -> AsyncIterator[Federation]:
    node = Federation(Settings.from_values(bullmq_environment))
    yield node
    await node.close()


@contextmanager
def fanning_out(environment: dict[str, str], directory: Path, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """The application at work; killed with the block, if it still is."""
    process = subprocess.Popen(
        [warm.PYTHON, "-m", "tests.acceptance.fan_out", str(count)],
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def recipients(full: bool) -> int:
    """So many that the application is still adding jobs when it is killed."""
    return 50_000 if full else 15_000


@pytest.fixture
def kills(full: bool) -> int:
    return 3 if full else 2


@pytest.mark.timeout(900)
async def test_a_fan_out_killed_while_it_adds_its_jobs_is_completed_by_the_sweeper(
    bullmq_node: Federation,
    bullmq_environment: dict[str, str],
    redis_url: str,
    queue_prefix: str,
    tmp_path: Path,
    recipients: int,
) -> None:
    """Thousands of servers, one delivery each: those added before the kill and those added after it, none twice."""
    waiting = f"{queue_prefix}:{DELIVERY_QUEUE_NAME}:wait"
    async with Redis.from_url(redis_url) as redis, asyncio.timeout(LONG_PATIENCE_SECONDS):
        others = await connections(redis)
        with fanning_out(bullmq_environment, tmp_path, recipients) as process:
            while not await redis.llen(waiting):
                assert process.poll() is None
                await asyncio.sleep(0.001)
        # What it had sent the server still takes, perhaps later than a question of ours.
        await eventually(lambda: connections(redis), lambda found: found <= others)
        added = await redis.llen(waiting)
        assert 0 < added < recipients
        sweeper = OutboxSweeper(bullmq_node.database, bullmq_node.delivery_queues, min_age=timedelta(0))
        swept = [await sweeper.sweep()]
        while not swept[-1].complete:
            swept.append(await sweeper.sweep())
        jobs = [job.decode() for job in await redis.lrange(waiting, 0, -1)]
    assert sum(each.added for each in swept) == recipients - added
    assert len(jobs) == len(set(jobs)) == recipients
    async with bullmq_node.database.read() as session:
        rows = set((await session.execute(select(col(DeliveryJob.id)))).scalars())
        servers = (await session.execute(select(func.count(col(DeliveryJob.server_url).distinct())))).scalar_one()
        references = (await session.execute(select(col(DeliveryPayload.refs)))).scalar_one()
    assert rows == set(jobs)
    assert servers == references == recipients


async def connections(redis: Redis) -> set[str]:
    return {client["id"] for client in await redis.client_list()}


async def test_a_fan_out_beside_its_queue_happens_whole_or_not_at_all(
    environment: dict[str, str], tmp_path: Path, kills: int
) -> None:
    """Left alone or killed at any instant, the database has text, row and job for every server, or nothing at all."""
    chance = random.Random(f"{sys.argv}{JOINED_RECIPIENTS}")
    node = Federation(Settings.from_values(environment))
    try:
        for kill in range(kills + 1):
            with fanning_out(environment, tmp_path, JOINED_RECIPIENTS) as process:
                assert process.stdout is not None
                await asyncio.to_thread(process.stdout.readline)  # from here on it inserts jobs and commits
                if kill == 0:
                    process.wait(PATIENCE_SECONDS)
                else:
                    await asyncio.sleep(chance.uniform(0, 0.3))
            async with node.database.read() as session:
                rows = (await session.execute(select(func.count()).select_from(DeliveryJob))).scalar_one()
                references = list((await session.execute(select(col(DeliveryPayload.refs)))).scalars())
            await node.delivery_queue.start()
            jobs = sum((await node.delivery_queue.counts()).values())
            assert rows == jobs == sum(references)
            assert set(references) == {JOINED_RECIPIENTS}
    finally:
        await node.close()
