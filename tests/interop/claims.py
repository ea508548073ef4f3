"""How the tests take jobs from our side, whichever of Node's queues they lie in."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from tests.patience import PATIENCE_SECONDS
from workers.jobs import Claim
from workers.storage.base import Storage

LEASES: Final = {"*": timedelta(seconds=30)}


async def next_claim(storage: Storage) -> Claim:
    """Wait for the next job as a worker waits, and claim it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (claims := await storage.claim("ours", leases=LEASES, limit=1)):
            await storage.wait(("*",), timeout=timedelta(seconds=PATIENCE_SECONDS))
    return claims[0]
