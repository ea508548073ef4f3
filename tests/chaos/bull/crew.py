"""The workers of a round: some in Node, some here, all of whom may die at any moment."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
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


Spawn = Callable[[Member], Awaitable[None]]
"""The member is at work; its stack ends it."""


class Crew:
    """As many workers of each kind, whoever is killed; `members` has the dead ones too."""

    def __init__(
        self, spawn: Mapping[str, Spawn], kinds: Sequence[str], directory: Path, chance: random.Random
    ) -> None:
        self._spawn = spawn
        self._kinds = kinds
        self._directory = directory
        self._chance = chance
        self._doomed: list[str] = []
        self.members: list[Member] = []

    @property
    def kills(self) -> Counter[str]:
        return Counter(member.kind for member in self.members if member.killed)

    async def fill(self) -> None:
        """Everybody who should be at work is."""
        missing = Counter(self._kinds) - Counter(member.kind for member in self.members if not member.killed)
        for kind in missing.elements():
            member = Member(kind, self._directory / f"{len(self.members):03}-{kind}.ledger", AsyncExitStack())
            self.members.append(member)
            await self._spawn[kind](member)

    async def kill_any(self) -> None:
        """One of them was killed with -9; in the long run each kind as often."""
        if not self._doomed:
            self._doomed = self._chance.sample(self._kinds, len(self._kinds))
        kind = self._doomed.pop()
        victim = self._chance.choice([one for one in self.members if one.kind == kind and not one.killed])
        await victim.stack.aclose()
        victim.killed = time.monotonic()


@asynccontextmanager
async def at_work(crew: Crew) -> AsyncIterator[Crew]:
    """The crew is full, and none of it is left when the context ends."""
    try:
        await crew.fill()
        yield crew
    finally:
        for member in crew.members:
            await member.stack.aclose()


def bull_crew(place: Place, chance: random.Random) -> Crew:
    """Two workers of each kind on a Bull queue."""
    spawn = {"node": partial(_spawn_in_node, place), "python": partial(_spawn_here, place)}
    return Crew(spawn, KINDS, place.directory, chance)


async def _spawn_in_node(place: Place, member: Member) -> None:
    peer = await member.stack.enter_async_context(bull_peer(place.version, place.url, place.queue))
    await peer.call("ledger", {"path": str(member.ledger), "late": place.lock_seconds / 2})
    milliseconds = int(place.lock_seconds * 1000)
    await peer.work(concurrency=CONCURRENCY, lock_ms=milliseconds, sweep_ms=milliseconds, stalls=OFTEN)


async def _spawn_here(place: Place, member: Member) -> None:
    order = Order(
        url=place.url,
        queue=place.queue,
        dialect=place.dialect,
        ledger=str(member.ledger),
        concurrency=CONCURRENCY,
        lease_seconds=place.lock_seconds,
    )
    await member.stack.enter_async_context(bull_child(order))
