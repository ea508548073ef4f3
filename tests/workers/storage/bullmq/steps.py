"""The short steps that tests of the BullMQ storage are made of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from workers.jobs import Claim, ErrorInfo, NewJob
from workers.storage.bullmq import BullMQStorage

LEASES = {"*": timedelta(seconds=30)}
ERROR = ErrorInfo(type="ValueError", message="no")
SHORT = timedelta(milliseconds=50)
PATIENCE = 10.0


def job(job_id: str, **fields: Any) -> NewJob:
    return NewJob(**{"id": job_id, "name": "work", "payload": b"{}", **fields})


async def claim_one(storage: BullMQStorage, lease: timedelta = timedelta(seconds=30)) -> Claim:
    [claim] = await storage.claim("w", leases={"*": lease}, limit=1)
    return claim


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """The condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.005)


async def all_blocked(client: Any, count: int) -> bool:
    clients = await client.client_list()
    return sum(one["cmd"] == "bzpopmin" and "b" in one["flags"] for one in clients) == count
