"""What one post to a great many servers costs on BullMQ: time until its jobs are in, and memory they take there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from redis.asyncio import Redis

from federation.app import Federation
from federation.base.jobs import POST_JOB
from federation.base.logs import configure_logging
from federation.base.settings import Settings
from federation.cli.running import upgrade
from federation.node.posts import POSTS_PATH
from federation.protocol.activities import post_activity

PAYLOAD_BYTES: Final = 2_400
MB: Final = 1_000_000


def fan_out(environment: Mapping[str, str], recipients: int) -> dict[str, float]:
    """Seconds to owe a post of 2.4 KB to that many servers, from its transaction's begin until the last job is in
    the queue, CPU seconds of it here, and what Redis needs for it.
    """
    configure_logging("warning")
    settings = Settings.from_values(environment)
    upgrade(settings)
    return asyncio.run(_measure(settings, recipients))


async def _measure(settings: Settings, recipients: int) -> dict[str, float]:
    federation = Federation(settings)
    assert settings.redis_url is not None
    assert federation.own_url is not None
    payload = _payload(federation.own_url)
    try:
        async with Redis.from_url(settings.redis_url.get_secret_value()) as redis:
            await _owe(federation, ["https://first.example"], payload)  # scripts are loaded, connections open
            before = await _used(redis)
            started, cpu = time.perf_counter(), time.process_time()
            await _owe(federation, [f"https://social-{number}.example" for number in range(recipients)], payload)
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            used = await _used(redis) - before
        queued = sum((await federation.delivery_queue.counts()).values()) - 1
    finally:
        await federation.close()
    if queued != recipients:
        raise RuntimeError(f"{queued} jobs are in the queue, and not {recipients}")
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


async def _used(redis: Redis) -> int:
    return int((await redis.info("memory"))["used_memory"])


def _payload(own_url: str) -> str:
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
