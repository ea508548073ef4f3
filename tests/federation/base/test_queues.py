"""The queues: the defaults of their jobs, and these jobs as they are stored."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import cast

from redis.asyncio import Redis

from federation.base.queues.queue import (
    DELIVERY_QUEUE_NAME,
    HEALTH_CHECK_QUEUE_NAME,
    JobQueue,
    delivery_queue,
    health_check_queue,
)
from federation.base.settings.settings import Settings
from federation.sealed.peers.health_checks import HealthSchedule
from tests.federation.base.conftest import DATA, claimed, opened
from workers.checks import MAX_DELAY
from workers.retry import RetryPolicy
from workers.storage.memory import MemoryStorage


async def stored(redis_url: str, key: str) -> dict[str, str]:
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        return cast("dict[str, str]", await redis.hgetall(key))


async def test_a_delivery_job_has_five_attempts_and_doubling_pauses_without_jitter(queue: JobQueue) -> None:
    """5, 10, 20 and 40 s; completed kept a day, failed ones a week."""
    await queue.add("deliver-follow", DATA.to_wire())
    claim = await claimed(queue)
    assert claim.backoff is not None
    assert [claim.backoff.delay(attempt).total_seconds() for attempt in range(1, 5)] == [5, 10, 20, 40]
    assert (claim.name, claim.max_attempts) == ("deliver-follow", 5)
    assert (claim.keep_completed, claim.keep_failed) == (timedelta(hours=24), timedelta(days=7))
    assert json.loads(claim.payload) == {
        "deliveryJobId": "d-1",
        "targetUrl": "https://b.example/api/auth/social/follows",
        "serverUrl": "https://b.example",
        "payload": '{"method":"FEDERATE"}',
    }


async def test_the_settings_change_the_defaults() -> None:
    """Attempts and the first pause are the operator's."""
    settings = Settings.from_values({"FEDERATION_DELIVERY_ATTEMPTS": 2, "FEDERATION_DELIVERY_BACKOFF": "1s"})
    queue = delivery_queue(settings, MemoryStorage())
    await queue.add("deliver-follow", {})
    claim = await claimed(queue)
    pauses = RetryPolicy(initial=timedelta(seconds=1), multiplier=2, maximum=MAX_DELAY, jitter=0)
    assert (claim.max_attempts, claim.backoff) == (2, pauses)


async def test_a_delivery_job_lies_in_redis_as_node_writes_it(redis_url: str, queue_prefix: str) -> None:
    """Name, data and options of a job added without options are those other implementations read."""
    queue = delivery_queue(*opened(redis_url, queue_prefix, DELIVERY_QUEUE_NAME))
    try:
        added = await queue.add("deliver-follow", DATA.to_wire(), {"jobId": "d-1"})
        fields = await stored(redis_url, f"{queue_prefix}:federation-delivery:{added.id}")
    finally:
        await queue.stop()
    assert fields["name"] == "deliver-follow"
    assert fields["data"] == json.dumps(DATA.to_wire(), separators=(",", ":"))
    options = json.loads(fields["opts"])
    assert options["attempts"] == 5
    assert (options["backoff"]["type"], options["backoff"]["delay"]) == ("exponential", 5000)
    assert "jitter" not in options["backoff"]
    assert options["removeOnComplete"] == {"age": 86400}
    assert options["removeOnFail"] == {"age": 604800}
    assert options.get("delay", 0) == 0


async def test_a_health_check_lies_in_redis_as_node_writes_it(redis_url: str, queue_prefix: str) -> None:
    """The agreed job id, a delay of five minutes, dropped when it ends, one attempt."""
    queue = health_check_queue(*opened(redis_url, queue_prefix, HEALTH_CHECK_QUEUE_NAME))
    schedule = HealthSchedule(queue, first_delay=timedelta(minutes=5), step=timedelta(minutes=10))
    try:
        await schedule("https://remote.example.com", 0)
        fields = await stored(redis_url, f"{queue_prefix}:federation-health-check:health-check_d4b64e4b29f0e3be_0")
    finally:
        await queue.stop()
    assert fields["name"] == "health-check"
    assert json.loads(fields["data"]) == {"serverUrl": "https://remote.example.com"}
    assert fields["delay"] == "300000"
    options = json.loads(fields["opts"])
    assert options["removeOnComplete"] is True
    assert options["removeOnFail"] is True
    assert options["delay"] == 300000
    assert options["attempts"] <= 1
