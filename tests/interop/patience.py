"""Waiting for what another process does: asked again and again, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from workers.jobs import Claim
from workers.storage.base import Storage

T = TypeVar("T")

PATIENCE_SECONDS = 20.0
LEASES = {"*": timedelta(seconds=30)}


async def eventually(look: Callable[[], Awaitable[T]], holds: Callable[[T], object]) -> T:
    """What `look` answered when it held."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        async with asyncio.timeout(PATIENCE_SECONDS):
            found = await look()
        if holds(found):
            return found
        assert time.monotonic() < deadline, f"after {PATIENCE_SECONDS:g} s there was still: {found!r}"
        await asyncio.sleep(0.02)


async def next_claim(storage: Storage) -> Claim:
    """The next job, waited for as a worker waits."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (claims := await storage.claim("ours", leases=LEASES, limit=1)):
            await storage.wait(("*",), timeout=timedelta(seconds=PATIENCE_SECONDS))
    return claims[0]
