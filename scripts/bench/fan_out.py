"""What one post to very many servers costs on BullMQ: the time until its jobs are queued, and their memory there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from redis.asyncio import Redis

from bench.deliveries import redis_of
from bench.outage.absent import states, take_down
from db import DeliveryState
from federation.app import Federation
from federation.base.jobs import POST_JOB
from federation.base.logs import configure_logging
from federation.base.settings import Settings
from federation.cli.running import upgrade
from federation.node.posts import POSTS_PATH
from federation.protocol.activities import post_activity

PAYLOAD_BYTES: Final = 2_400
MB: Final = 1_000_000


def fan_out(environment: Mapping[str, str], recipients: int, *, down: int = 0) -> dict[str, float]:
    """Measure what it takes to owe a post of 2.4 KB to that many servers, `down` of which are down.

    That is the seconds from the transaction's begin until the last job is in the queue, the CPU seconds of it in this
    process, and the memory that Redis needs.
    """
    configure_logging("warning")
    settings = Settings.from_values(environment)
    upgrade(settings)
    return asyncio.run(_measure(settings, recipients, down))


async def _measure(settings: Settings, recipients: int, down: int) -> dict[str, float]:
    federation = Federation(settings)
    assert federation.own_url is not None
    payload = payload_of(federation.own_url)
    servers = [f"https://social-{number}.example" for number in range(recipients)]
    away = servers[:: recipients // down] if down else []
    try:
        async with redis_of(federation) as redis:
            if away:
                await take_down(federation, away)
            await _owe(federation, ["https://first.example"], payload)  # loads scripts, opens connections
            before = await _used(redis)
            started, cpu = time.perf_counter(), time.process_time()
            await _owe(federation, servers, payload)
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            used = await _used(redis) - before
        queued = sum((await federation.delivery_queue.counts()).values()) - 1
        held = (await states(federation)).get(DeliveryState.HELD, 0)
    finally:
        await federation.close()
    if (queued, held) != (recipients - len(away), len(away)):
        raise RuntimeError(f"{queued} jobs are in the queue, and {held} deliveries held, of {recipients}")
    return {
        "recipients": recipients,
        "payload_bytes": len(payload),
        "enqueue_s": seconds,
        "cpu_s": cpu,
        "redis_mb": used / MB,
        "redis_bytes_each": used / recipients,
    }


async def _owe(federation: Federation, servers: list[str], payload: str) -> None:
    async with federation.outbox.transaction() as session:
        await federation.outbox.enqueue_fanout(session, POST_JOB, POSTS_PATH, servers, payload)


async def _used(redis: Redis | None) -> int:
    return int((await redis.info("memory"))["used_memory"]) if redis is not None else 0


def payload_of(own_url: str) -> str:
    """Return a post of 2.4 KB."""

    def activity(text: str) -> str:
        return post_activity(
            federation_url=own_url,
            post_id="post",
            content=[{"type": "text", "value": text}],
            author_id="alice",
            published=datetime.now(UTC),
            is_private=False,
        )

    return activity("x" * (PAYLOAD_BYTES - len(activity(""))))
