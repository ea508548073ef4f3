"""The workers of a round: some in Node, some here, all of whom may die at any moment."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.interop.bull_child import Order, bull_child
from tests.interop.peer import bull_peer
from workers.storage.bull.codec import Dialect

OFTEN: Final = 1_000_000
CONCURRENCY: Final = 3
KINDS: Final = ("node", "node", "python", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The queue of a round, and the lock its workers take."""

    url: str
    queue: str
    version: str
    dialect: Dialect
    lock_seconds: float
    directory: Path


@dataclass(slots=True)
class Member:
    """A worker process; closing its stack kills it."""

    kind: str
    ledger: Path
    stack: AsyncExitStack
    killed: float | None = None


class Crew:
    """Two workers of each kind, whoever is killed; `members` has the dead ones too."""

    def __init__(self, place: Place, chance: random.Random) -> None:
        self._place = place
        self._chance = chance
        self._doomed: list[str] = []
        self.members: list[Member] = []

    @property
    def kills(self) -> Counter[str]:
        return Counter(member.kind for member in self.members if member.killed)

    async def fill(self) -> None:
        """Everybody who should be at work is."""
        missing = Counter(KINDS) - Counter(member.kind for member in self.members if not member.killed)
        for kind in missing.elements():
            await self._spawn(kind)

    async def _spawn(self, kind: str) -> None:
        member = Member(kind, self._place.directory / f"{len(self.members):03}-{kind}.ledger", AsyncExitStack())
        self.members.append(member)
        if kind == "python":
            await member.stack.enter_async_context(bull_child(self._order(member)))
            return
        place = self._place
        peer = await member.stack.enter_async_context(bull_peer(place.version, place.url, place.queue))
        await peer.call("ledger", {"path": str(member.ledger), "late": place.lock_seconds / 2})
        milliseconds = int(place.lock_seconds * 1000)
        await peer.work(concurrency=CONCURRENCY, lock_ms=milliseconds, sweep_ms=milliseconds, stalls=OFTEN)

    def _order(self, member: Member) -> Order:
        place = self._place
        return Order(
            url=place.url,
            queue=place.queue,
            dialect=place.dialect,
            ledger=str(member.ledger),
            concurrency=CONCURRENCY,
            lease_seconds=place.lock_seconds,
        )

    async def kill_any(self) -> None:
        """One of them was killed with -9; in the long run each kind as often."""
        if not self._doomed:
            self._doomed = self._chance.sample(KINDS, len(KINDS))
        kind = self._doomed.pop()
        victim = self._chance.choice([one for one in self.members if one.kind == kind and not one.killed])
        await victim.stack.aclose()
        victim.killed = time.monotonic()


@asynccontextmanager
async def crew_of(place: Place, chance: random.Random) -> AsyncIterator[Crew]:
    """A full crew, none of which is left when the context ends."""
    crew = Crew(place, chance)
    try:
        await crew.fill()
        yield crew
    finally:
        for member in crew.members:
            await member.stack.aclose()
