"""What lies in Redis is what a Node process that shares the queues writes and reads."""

from __future__ import annotations

import json
from datetime import timedelta

import redis.asyncio

from federation.base.queues.job_data import FOLLOW_JOB, FederationDeliveryJob
from federation.base.queues.queue import DELIVERY_QUEUE_NAME, HEALTH_CHECK_QUEUE_NAME
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings

CHECK = "health-check_d4b64e4b29f0e3be_0"


async def test_a_delivery_and_a_probe_as_node_writes_them(
    make_settings: MakeSettings, redis_url: str, queue_prefix: str
) -> None:
    """Hash fields and options of both kinds of job equal those of bullmq's own producer, but for a mark of ours."""
    settings = make_settings(
        redis_url=redis_url,
        federation_queue_prefix=queue_prefix,
        federation_delivery_backoff="5s",
        federation_health_first_delay="5m",
    )
    federation = Federation(settings)
    client = redis.asyncio.Redis.from_url(redis_url, decode_responses=True)
    job = FederationDeliveryJob(
        delivery_job_id="d-1",
        target_url="https://b.example/api/auth/social/follows",
        server_url="https://b.example",
        payload='{"method":"FEDERATE"}',
    )
    try:
        await federation.delivery_queue.add(FOLLOW_JOB, job.to_wire(), {"jobId": "d-1"})
        await federation.schedule_health_check("https://remote.example.com", 0)
        delivery = await client.hgetall(f"{queue_prefix}:{DELIVERY_QUEUE_NAME}:d-1")
        probe = await client.hgetall(f"{queue_prefix}:{HEALTH_CHECK_QUEUE_NAME}:{CHECK}")
        due = await client.zscore(f"{queue_prefix}:{HEALTH_CHECK_QUEUE_NAME}:delayed", CHECK)
        waiting = await client.lrange(f"{queue_prefix}:{DELIVERY_QUEUE_NAME}:wait", 0, -1)
    finally:
        await client.aclose()
        await federation.close()

    assert delivery["name"] == "deliver-follow"
    assert delivery["data"] == (
        '{"deliveryJobId":"d-1","targetUrl":"https://b.example/api/auth/social/follows",'
        '"serverUrl":"https://b.example","payload":"{\\"method\\":\\"FEDERATE\\"}"}'
    )
    assert _options(delivery) == {
        "removeOnFail": {"age": 604800},
        "removeOnComplete": {"age": 86400},
        "backoff": {"delay": 5000, "type": "exponential"},
        "attempts": 5,
        "jobId": "d-1",
        "workers": 1,
    }
    assert (delivery["delay"], delivery["priority"]) == ("0", "0")
    assert waiting == ["d-1"]
    assert probe["data"] == '{"serverUrl":"https://remote.example.com"}'
    assert _options(probe) == {
        "removeOnFail": True,
        "removeOnComplete": True,
        "jobId": CHECK,
        "delay": 300000,
        "attempts": 1,
        "workers": 1,
    }
    assert probe["delay"] == "300000"
    assert due is not None
    assert abs(due / 4096 - int(probe["timestamp"]) - timedelta(minutes=5) / timedelta(milliseconds=1)) < 1


def _options(fields: dict[str, str]) -> dict[str, object]:
    """The job's options; a delay of 0 says nothing."""
    options: dict[str, object] = json.loads(fields["opts"])
    return {name: value for name, value in options.items() if (name, value) != ("delay", 0)}
