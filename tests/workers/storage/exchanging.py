"""Turns that tests take: settlements, and the claims that travel with them."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from workers.jobs import Claim, Settlement
from workers.storage.abilities import Exchange, ExchangesJobs
from workers.storage.base import Storage
from workers.testing import steps

LEASES: Final = {"*": timedelta(seconds=30)}


async def exchange_on(storage: ExchangesJobs, *settlements: Settlement, limit: int = 2) -> Exchange:
    return await storage.settle_and_claim(settlements, "w", leases=LEASES, limit=limit)


def brought(turn: Exchange) -> list[str]:
    assert turn.claims is not None
    return steps.ids(turn.claims)


async def held(storage: Storage, *waiting: str) -> Claim:
    """A claim, with these jobs waiting behind it."""
    await steps.enqueue(storage, steps.job("first"))
    claim = await steps.claim_one(storage)
    await steps.enqueue(storage, *map(steps.job, waiting))
    return claim
