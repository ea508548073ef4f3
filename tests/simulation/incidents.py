"""What happens to the node beside outages: its clock is set, operators meddle, users follow and think better of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import SQLAlchemyError

from federation.admin import blacklist
from federation.admin.deliveries import holds
from federation.admin.servers.servers import forget
from federation.protocol.activities import ActivityMethod
from federation.runtime.composition import Federation
from federation.sealed.outbound.activities import ServerRefused
from federation.sealed.peers.discovery import DiscoveryError
from tests.peer import settle
from tests.simulation.node import Process
from tests.simulation.plan import ClockJump, Deed, Meddling, PlannedFollow
from tests.simulation.records import MishapKind
from tests.simulation.servers import server_url
from workers import WorkersError

if TYPE_CHECKING:
    from tests.simulation.world import World

AGAIN_AFTER: Final = 20.0
"""Seconds until somebody tries again what the database or the queue did not take."""
REFUSED_AGAIN_AFTER: Final = 600.0
"""The same for what is refused because of the server: it is blacklisted, or cannot be discovered."""

Event = tuple[float, Callable[[], Awaitable[None]]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A user here and one on a server."""

    server: str
    follower: str
    following: str


@dataclass(frozen=True, slots=True)
class Wish:
    """The user wanted to follow, or no more; `is_owed`: and the server is to hear of it."""

    method: ActivityMethod
    follow_id: str
    is_owed: bool
    at: float


@dataclass(frozen=True, slots=True)
class Ban:
    """Nothing is to be sent to a server meanwhile, because an operator said so."""

    deed: Deed
    server: str
    start: float
    end: float


_Order = Callable[[Federation, str], Awaitable[object]]
_LASTING: Final[Mapping[Deed, tuple[_Order, _Order]]] = {
    Deed.BLACKLISTS: (
        lambda federation, url: blacklist.add(federation.database, url, reason="simulated"),
        lambda federation, url: blacklist.remove(federation.database, url),
    ),
    Deed.HOLDS: (holds.hold, holds.release),
}
"""What begins it, and what ends it."""


class Incidents:
    """Those of one world; what is written is written by its application process."""

    def __init__(
        self,
        world: World,
        app: Process,
        workers: Sequence[Process],
        *,
        until: Callable[[float], Awaitable[None]],
        interrupt: Callable[[], None],
    ) -> None:
        self._world = world
        self._app = app
        self._workers = workers
        self._until = until
        self._interrupt = interrupt

    def events(self) -> list[Event]:
        plan = self._world.plan
        events: list[Event] = [(jump.at, partial(self._set_clock, jump)) for jump in plan.jumps]
        events += [(each.at, partial(self._meddle, each)) for each in plan.meddlings]
        for number, follow in enumerate(plan.follows):
            events.append((follow.times[0], partial(self._change_mind, number, follow)))
        return events

    async def _set_clock(self, jump: ClockJump) -> None:
        self._world.story.tell("* clock set", by=jump.by, process=jump.process)
        if jump.process is not None:  # which is no excuse: the database's clock is what counts
            self._workers[jump.process].clock.offset += jump.by
            return
        self._world.note(MishapKind.CLOCK, jump.at - 1, jump.at)
        self._world.space.clock.set(jump.by)
        self._world.space.changes += 1  # what is due is another time of the loop now
        self._interrupt()

    async def _meddle(self, meddling: Meddling) -> None:
        url = server_url(meddling.server)
        self._world.story.tell("* operator", server_url=url, deed=meddling.deed)
        if meddling.deed is Deed.FORGETS:
            await self._write(lambda federation: forget(federation.database, url))
            return
        begin, end = _LASTING[meddling.deed]
        await self._write(lambda federation: begin(federation, url))
        start = asyncio.get_running_loop().time()
        await self._until(meddling.end)
        self._world.bans.append(Ban(meddling.deed, url, start, asyncio.get_running_loop().time()))
        await self._write(lambda federation: end(federation, url))
        self._world.story.tell("* operator", server_url=url, deed=f"{meddling.deed}, and now no more")

    async def _change_mind(self, number: int, planned: PlannedFollow) -> None:
        pair = Pair(server_url(planned.server), f"user-{number}", f"their-user-{number}")
        for at, method in zip(planned.times, cycle((ActivityMethod.FEDERATE, ActivityMethod.UNFOLLOW)), strict=False):
            await self._until(at)
            await self._write(partial(self._follow if method is ActivityMethod.FEDERATE else self._unfollow, pair))

    async def _follow(self, pair: Pair, federation: Federation) -> None:
        await settle(federation, pair.follower)
        async with federation.outbox.transaction() as session:
            requested = await federation.producers.request_follow(
                session, follower_id=pair.follower, following_id=pair.following, server_url=pair.server
            )
        self._wished(pair, ActivityMethod.FEDERATE, requested.follow_id, is_owed=True)

    async def _unfollow(self, pair: Pair, federation: Federation) -> None:
        async with federation.outbox.transaction() as session:
            delivery_id = await federation.producers.request_unfollow(
                session, follower_id=pair.follower, following_id=pair.following, server_url=pair.server
            )
        follow_id = self._world.wanted[pair][-1].follow_id
        self._wished(pair, ActivityMethod.UNFOLLOW, follow_id, is_owed=delivery_id is not None)

    def _wished(self, pair: Pair, method: ActivityMethod, follow_id: str, *, is_owed: bool) -> None:
        now = asyncio.get_running_loop().time()
        self._world.wanted.setdefault(pair, []).append(Wish(method, follow_id, is_owed, now))
        self._world.story.tell("* wished", server_url=pair.server, method=method, follow_id=follow_id, is_owed=is_owed)

    async def _write(self, work: Callable[[Federation], Awaitable[object]]) -> None:
        """It is done, or tried again where the database or the queue is away, or the server just blacklisted."""
        while True:
            assert self._app.federation is not None
            try:
                await work(self._app.federation)
                return
            except (SQLAlchemyError, WorkersError, ServerRefused, DiscoveryError) as error:
                self._world.story.tell("* not done", error=repr(error)[:300])
                is_away = isinstance(error, SQLAlchemyError | WorkersError)
                await asyncio.sleep(AGAIN_AFTER if is_away else REFUSED_AGAIN_AFTER)
