"""Messages on a Bull queue: what we publish Node's listeners take, and whatever is published harms nobody here."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

from redis.asyncio import Redis

from tests.interop.bull_jobs import Obedient
from tests.interop.bull_queue import ERROR, Ids, a_job, ended
from tests.interop.claims import next_claim
from tests.interop.peer import BullPeer
from tests.patience import PATIENCE_SECONDS, eventually
from tests.workers.running import running
from workers import Worker
from workers.jobs import JobEvent, JobEventKind, Retried
from workers.storage.bull import BullStorage

JOB_FIELDS = {
    "data": dict,
    "opts": dict,
    "progress": int,
    "delay": int,
    "timestamp": int,
    "attempts": int,
    "attemptsMade": int,
    "stacktrace": list,
    "returnvalue": object,
}
"""What a message about a job has for each field."""


async def test_node_hears_our_events(
    queue: BullStorage, peer: BullPeer, ids: Ids, redis_url: str, version: str
) -> None:
    """What we publish is what Bull publishes: Node's listeners are told of the jobs that run here, and none dies."""
    events = [] if version == "1.0.0" else ["waiting", "failed", "progress", "completed"]
    await peer.call("listen", events)
    data = {"progress": [50], "text": "ü"}

    async def add_ours() -> str:
        job = a_job(ids(), data, max_attempts=2)
        await queue.enqueue([job])
        return job.id

    for add in (add_ours, partial(peer.add, data, attempts=2, timestamp=1_700_000_000_000)):
        before = len(await peer.call("heard"))
        async with overheard(redis_url, f"*@{queue.queue}") as messages:
            job_id = await add()
            await run_twice(queue, job_id)
            told = await eventually(partial(told_since, peer, before), lambda told: told[-1]["event"] == "resumed")
        assert [one["event"] for one in told] == [*events, "paused", "resumed"]
        assert all((one["id"], one["data"]["text"]) == (job_id, "ü") for one in told[: len(events)])
        assert len(messages) == len(events)
        for _, job, *_ in map(json.loads, messages):
            assert job.keys() == JOB_FIELDS.keys()
            assert all(isinstance(job[field], kind) for field, kind in JOB_FIELDS.items())
            assert job["opts"]["jobId"] == job_id


async def run_twice(queue: BullStorage, job_id: str) -> None:
    """The job failed, then told its progress and completed here; then the queue was paused and resumed."""
    await queue.settle([Retried(claim=await next_claim(queue), delay=timedelta(0), error=ERROR)])
    async with running(Worker(queue, {"*": Obedient()})):
        await ended(queue, job_id)
    await queue.pause()
    await queue.resume()


async def told_since(peer: BullPeer, count: int) -> list[dict[str, Any]]:
    """What Node's listeners were told of after so many events; at least one."""
    told = await eventually(partial(peer.call, "heard"), lambda told: len(told) > count)
    return list(told[count:])


@asynccontextmanager
async def overheard(url: str, pattern: str) -> AsyncIterator[list[bytes]]:
    """Every message on the channels of this pattern, while the context lasts."""
    found: list[bytes] = []
    async with Redis.from_url(url) as client, client.pubsub() as channels:
        await channels.psubscribe(pattern)
        await channels.get_message(timeout=PATIENCE_SECONDS)
        yield found
        while message := await channels.get_message(timeout=0.1):
            found.append(message["data"])


async def test_a_malformed_event_ends_node(queue: BullStorage, peer: BullPeer, redis_url: str, version: str) -> None:
    """A listener of Bull 1.1 does not survive a message that is not made as Bull makes them; 1.0 hears none."""
    events = [] if version == "1.0.0" else ["completed"]
    await peer.call("listen", events)
    async with Redis.from_url(redis_url) as client:
        assert await client.publish(f"completed@{queue.queue}", '["somebody",{}]') == len(events)
    if events:
        await peer.dead()
    else:
        assert await peer.call("heard") == []


JUNK: list[str | bytes] = ["junk", "", "[]", "null", '["u"]', '["u",{}]', "1e999", "-1", "\xff", b"\xff\xc1"]


async def test_junk_on_channels_harms_nobody_here(queue: BullStorage, peer: BullPeer, redis_url: str) -> None:
    """Whatever is said on the channels that we listen to, a worker runs Node's jobs and a subscriber hears of them."""
    names = [f"bull:{queue.queue}:{name}" for name in ("delayed", "paused", "jobs")]
    events = [f"{name}@{queue.queue}" for name in ("waiting", "progress", "completed", "failed", "stalled", "cleaned")]
    worker = Worker(queue, {"*": Obedient()})
    async with (
        running(worker),
        queue.events() as subscription,
        Redis.from_url(redis_url, decode_responses=True) as client,
    ):
        await ended(queue, await peer.add({}))
        channels = {*names, *events, *map(os.fsdecode, await client.pubsub_channels(f"*{queue.queue}*"))}
        for channel, junk in product(sorted(channels), JUNK):
            await client.publish(channel, junk)
        last = await peer.add({"result": 1}, delay=50)
        assert (await ended(queue, last)).result == b"1"
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await subscription.get() != JobEvent(kind=JobEventKind.COMPLETED, job_id=last):
                pass
