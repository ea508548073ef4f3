"""The short steps that tests of the Bull storage are made of, and Node's side of the protocol, a command at a time."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis

from workers.jobs import ErrorInfo
from workers.storage.bull import BullStorage
from workers.testing.steps import PATIENCE, until

LEASES = {"*": timedelta(seconds=30)}
ERROR = ErrorInfo(type="ValueError", message="no", stack="ValueError: no")
SHORT = timedelta(milliseconds=50)


def key(storage: BullStorage, name: str) -> str:
    """A key of the queue as Node names it."""
    return f"bull:{storage.queue}:{name}"


async def claimed(storage: BullStorage, limit: int = 10) -> list[str]:
    """The ids that one claim brings."""
    return [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=limit)]


@asynccontextmanager
async def a_script_of(client: Redis) -> AsyncIterator[None]:
    """At the end of the block somebody, whom the block has started, has run a script."""
    before = await _scripts_run(client)
    yield

    async def ran() -> bool:
        return await _scripts_run(client) > before

    await until(ran)


async def _scripts_run(client: Redis) -> int:
    """How often the server has run one to its end."""
    told = await client.info("commandstats")
    stats = [told.get(f"cmdstat_{name}", {}) for name in ("eval", "evalsha")]
    return sum(stat.get("calls", 0) - stat.get("failed_calls", 0) for stat in stats)


class NodeBull:
    """What a Node process of Bull 1.1 does to the queue, each step of its own as it is there."""

    def __init__(self, client: Redis, storage: BullStorage) -> None:
        self.client = client
        self.storage = storage
        self.token = str(uuid.uuid4())

    def key(self, name: str) -> str:
        return key(self.storage, name)

    async def add(self, job_id: str | None = None, *, line: str = "wait", **fields: Any) -> str:
        """A job of Node's is in line."""
        number = str(await self.client.incr(self.key("id")))
        raw = job_id or number
        record = {
            "data": '{"from":"node"}',
            "opts": "{}",
            "progress": 0,
            "delay": 0,
            "timestamp": 1_700_000_000_000,
            "attempts": 1,
            "attemptsMade": 0,
            "stacktrace": "[]",
            "returnvalue": "null",
            **fields,
        }
        await self.client.hset(self.key(raw), mapping=record)
        await self.client.lpush(self.key(line), raw)
        await self.client.publish(self.key("jobs"), raw)
        return raw

    async def take(self) -> str | None:
        """The next job is active, and not locked yet."""
        raw = await self.client.rpoplpush(self.key("wait"), self.key("active"))
        return None if raw is None else str(raw)

    async def lock(self, raw: str, milliseconds: int = 60_000) -> None:
        """The active job is this process's."""
        assert await self.client.set(self.key(f"{raw}:lock"), self.token, px=milliseconds, nx=True)
        await self.client.hset(self.key(raw), "lockAcquired", 1)

    async def unlock(self, raw: str) -> None:
        await self.client.delete(self.key(f"{raw}:lock"))

    async def sweep(self) -> None:
        """Active jobs without a lock are in front of the line again, counted as stalled if they had one."""
        for raw in await self.client.lrange(self.key("active"), 0, -1):
            if not await self.client.exists(self.key(f"{raw}:lock")):
                await self.client.lrem(self.key("active"), 0, raw)
                await self.client.rpush(self.key("wait"), raw)
                if await self.client.hexists(self.key(raw), "lockAcquired"):
                    await self.client.hincrby(self.key(raw), "stalledCounter", 1)

    async def line(self, name: str) -> list[str]:
        """The ids in a list, the next to run first."""
        return [str(raw) for raw in reversed(await self.client.lrange(self.key(name), 0, -1))]

    async def record(self, raw: str) -> dict[str, str]:
        return dict(await self.client.hgetall(self.key(raw)))


async def expired(node: NodeBull, raw: str) -> None:
    """The lock of the job has run out."""
    await until(lambda: _is_free(node, raw))


async def _is_free(node: NodeBull, raw: str) -> bool:
    return not await node.client.exists(node.key(f"{raw}:lock"))


@asynccontextmanager
async def heard(client: Redis, *channels: str) -> AsyncIterator[Callable[[], Awaitable[tuple[str, str]]]]:
    """The next message on any of the channels, as `(channel, text)`."""
    async with client.pubsub() as pubsub:
        await pubsub.subscribe(*channels)
        for _ in channels:
            await pubsub.get_message(timeout=PATIENCE)

        async def following() -> tuple[str, str]:
            message = await pubsub.get_message(timeout=PATIENCE)
            assert message is not None, "nothing was published"
            return str(message["channel"]), str(message["data"])

        yield following


def parsed(message: tuple[str, str]) -> Any:
    return json.loads(message[1])
