"""What an outsider finds in Redis: neither what was written nor a key."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from federation.base.queues.job_data import FOLLOW_JOB, POST_JOB
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings, redis_place
from tests.federation.delivery.harness import POST_TEXT, Site, follow_payload, post_payload
from tests.federation.protocol.vectors import A
from tests.misbehaving import respond
from tests.peer import FOLLOWS_PATH, POSTS_PATH, Peer, acquaint
from workers import JobState

FOLLOW_ID = "follow-that-nobody-may-read"


@pytest.fixture(params=["redis", "bullmq", "bull"])
async def site(
    request: pytest.FixtureRequest, make_settings: MakeSettings, redis_url: str, queue_prefix: str
) -> AsyncIterator[Site]:
    place = redis_place(request.param, redis_url)
    settings = make_settings(**place, federation_queue_prefix=queue_prefix, federation_delivery_attempts=2)
    federation = Federation(settings)
    async with Site(federation) as running:
        yield running
    await federation.close()


async def everything(redis: Redis, pattern: str) -> str:
    """The names and contents of all keys, as text."""
    found: list[object] = []
    async for key in redis.scan_iter(pattern):
        kind = (await redis.type(key)).decode()
        match kind:
            case "string":
                content: object = await redis.get(key)
            case "hash":
                content = await redis.hgetall(key)
            case "list":
                content = await redis.lrange(key, 0, -1)
            case "set":
                content = await redis.smembers(key)
            case "zset":
                content = await redis.zrange(key, 0, -1, withscores=True)
            case "stream":
                content = await redis.xrange(key)
            case _:
                raise AssertionError(f"{key!r} is a {kind}")
        found.append((key, content))
    return repr(found)


async def test_redis_holds_neither_texts_nor_keys(site: Site, peer: Peer, redis_url: str, queue_prefix: str) -> None:
    """Of deliveries and fan-outs that wait, are held, failed, and were delivered."""
    await acquaint(site.federation, peer)
    outbox = site.federation.outbox
    async with outbox.transaction() as session:
        delivered = await outbox.enqueue_fanout(session, POST_JOB, POSTS_PATH, [peer.url], post_payload("post-1"))
    await site.ended(*delivered)
    peer.server.default = respond(410, {"Content-Type": "application/json"}, b"{}")
    (failed,) = await site.owe_posts(peer, 1)
    assert (await site.outcome(failed)).state is JobState.FAILED
    peer.server.default = respond(500)
    async with outbox.transaction() as session:
        held = await outbox.enqueue_delivery(
            session, FOLLOW_JOB, peer.url + FOLLOWS_PATH, peer.url, follow_payload(FOLLOW_ID)
        )
    fate = await site.outcome(held)
    assert (fate.state, fate.codes) == (None, ["HTTP_500"] * 2)
    await site.stop()
    async with outbox.transaction() as session:
        await outbox.enqueue_fanout(session, POST_JOB, POSTS_PATH, [peer.url], post_payload("post-2"))

    async with Redis.from_url(redis_url) as redis:
        text = await everything(redis, f"*{queue_prefix}:*")
    assert failed in text
    assert delivered[0] in text
    for secret in (POST_TEXT, FOLLOW_ID, "FEDERATE", *(key for name, key in A.env.items() if "PRIVATE" in name)):
        assert secret not in text
