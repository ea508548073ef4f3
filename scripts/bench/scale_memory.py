"""What a waiting delivery takes in a queue, and what a process remembers of very many servers."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from redis import Redis
from sqlalchemy import text

from bench.node import fresh_places, made_node
from bench.scale_rows import Size, fill
from db import new_id
from federation.app import Federation
from federation.base.jobs import POST_JOB
from federation.base.settings import Settings
from federation.delivery.rows import delivery_job

AT_ONCE: Final = 500
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
MIB: Final = 1024 * 1024
SQL: Final = ("workers_jobs", "workers_payloads")
Tell = Callable[[str], None]


def of_waiting_jobs(jobs: int, tell: Tell) -> list[dict[str, object]]:
    """Measure the bytes of a waiting delivery in each kind of queue, with a tenth of the jobs and with all."""
    found: list[dict[str, object]] = []
    for kind, scheme in (("redis", "redis"), ("bullmq", "bullmq+redis"), ("postgres", "")):
        with fresh_places("bullmq") as values:
            if scheme:
                values["QUEUE_URL"] = values.pop("REDIS_URL").replace("redis", scheme, 1)
            else:
                del values["REDIS_URL"]
            for each in asyncio.run(_waiting(kind, made_node(values), values, [max(jobs // 10, 1), jobs])):
                tell(f"  {kind:10} {each['jobs']:>9} jobs {each['bytes_each']:>8} bytes each")
                found.append(each)
    return found


async def _waiting(
    kind: str, settings: Settings, values: Mapping[str, str], counts: list[int]
) -> list[dict[str, object]]:
    federation = Federation(settings)
    found: list[dict[str, object]] = []
    try:
        await federation.delivery_queue.start()
        await _enqueue(federation, 1)
        empty, made = await _used(federation, values), 0
        for count in counts:
            await _enqueue(federation, count - made)
            made = count
            each = (await _used(federation, values) - empty) / count
            found.append({"queue": kind, "jobs": count, "bytes_each": round(each)})
    finally:
        await federation.close()
    return found


async def _enqueue(federation: Federation, count: int) -> None:
    for start in range(0, count, AT_ONCE):
        servers = [f"https://social-{number}.example" for number in range(start, min(start + AT_ONCE, count))]
        jobs = [
            delivery_job(
                POST_JOB, new_id(), target_url=f"{each}/api/auth/social/posts", server_url=each, payload_id=new_id()
            )
            for each in servers
        ]
        await federation.delivery_queue.add_bulk(jobs)


async def _used(federation: Federation, values: Mapping[str, str]) -> int:
    """Return the bytes that the queue takes in its server."""
    if "QUEUE_URL" in values:
        url = values["QUEUE_URL"].removeprefix("bullmq+")
        with Redis.from_url(url) as client:
            return int(client.info("memory")["used_memory"])
    sizes = " + ".join(f"pg_total_relation_size('{table}')" for table in SQL)
    async with federation.database.read() as session:
        return int((await session.execute(text(f"SELECT {sizes}"))).scalar_one())


async def of_process(settings: Settings, servers: int, tell: Tell) -> list[dict[str, object]]:
    """Let a process look at very many servers as deliveries do, and measure what it keeps of them."""
    federation = Federation(settings)
    found: list[dict[str, object]] = []
    try:
        size = Size(servers=servers, held=10, attempts=10)
        await federation.database.transact(lambda connection: fill(connection, size))
        seen, before = 0, 0
        for count in (servers // 10, servers):
            await _hear_of(federation, range(seen, count))
            seen = count
            gc.collect()
            before = before or _resident()
            each = {"servers": count, "mib_more": round((_resident() - before) / MIB, 1), **_remembered(federation)}
            tell(f"  {each}")
            found.append(each)
    finally:
        await federation.close()
    return found


async def _hear_of(federation: Federation, numbers: range) -> None:
    for start in range(numbers.start, numbers.stop, AT_ONCE):
        group = range(start, min(start + AT_ONCE, numbers.stop))
        await asyncio.gather(*(_look(federation, f"https://social-{number}.example") for number in group))


async def _look(federation: Federation, url: str) -> None:
    """Do what an attempt does before it sends."""
    await federation.registry.standing(url)
    await federation.links.view(url)
    async with federation.room.turn(url, size=1_000, leave_slot=lambda: True) as turn:
        turn.answered, turn.waited = True, 0.01


def _remembered(federation: Federation) -> dict[str, int]:
    return {
        "registry": len(federation.registry._servers._entries),
        "links": len(federation.links._cache._entries),
        "room": len(federation.room._servers),
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
