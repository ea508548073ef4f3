"""What actors of servers that take activities send to us: kept, swept, and handled once, whatever dies meanwhile.

A sender comes again until it is told that its activity is stored, and now and then after that. What the door verifies
is not simulated: what arrives is stored as the door stores it. The function of the application writes a row, and, as
planned, raises at first, always, or has its process die before or after its transaction.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from federation.activitypub.handlers import HANDLERS, IncomingActivity
from federation.activitypub.received import ATTEMPTS
from tests.simulation.node import Process, this_process
from tests.simulation.plan import MINUTE, WEEK, Death, Plan, PlannedArrival
from tests.simulation.servers import server_url
from tests.simulation.story import moment
from workers import WorkersError

if TYPE_CHECKING:
    from tests.simulation.world import World

TYPE: Final = "Arrive"
AGAIN_AFTER: Final = 20.0
"""Seconds until a sender comes again that was told of an outage of ours."""
LONGEST: Final = 60 * MINUTE
"""How long an activity and those before it of its actor may take, where nothing of ours fails for good."""
TABLE: Final = "CREATE TABLE simulated_effects (at REAL, activity_id TEXT)"


def arrivals_of(chance: random.Random, plan: Plan, senders: list[int]) -> tuple[PlannedArrival, ...]:
    """Several of each of some servers, mostly when a process dies or something of ours is away."""
    times = [each.at for each in plan.kills] + [each.start for each in plan.outages] + list(plan.losses)
    found: list[PlannedArrival] = []
    for number in chance.sample(senders, min(4, len(senders))):
        near = chance.choice(times) if times and chance.random() < 0.7 else chance.uniform(MINUTE, WEEK)
        for _ in range(chance.randint(1, 6)):
            at = max(near + chance.uniform(-2, 2), 1.0)
            raises = chance.choice((0, 0, 0, 1, 2, ATTEMPTS))
            death = chance.choice((None, None, Death.BEFORE, Death.AFTER))
            again = at + math.exp(chance.uniform(0, math.log(WEEK))) if chance.random() < 0.5 else None
            found.append(PlannedArrival(at, number, raises=raises, death=death, again=again))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Stored:
    """An activity of which its sender knows, since `at`, that it is stored."""

    activity_id: str
    actor: str
    at: float
    planned: PlannedArrival


class Senders:
    """Those of one world, and what our application does with what they send."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._sent = 0
        self._planned: dict[str, PlannedArrival] = {}
        self._tried: Counter[str] = Counter()
        self._died: set[str] = set()

    async def send(self, planned: PlannedArrival) -> None:
        """Send it until it is stored, and once more if that is planned."""
        self._sent += 1
        actor = f"{server_url(planned.server)}/users/eve"
        name = f"{actor}/{self._sent}"
        self._planned[name] = planned
        await self._deliver(name, actor)
        now = asyncio.get_running_loop().time()
        self._world.stored.append(Stored(name, actor, now, planned))
        self._world.story.tell("* stored", activity=name)
        if planned.again is not None and planned.again < WEEK:
            await asyncio.sleep(max(planned.again - now, 0.0))
            await self._deliver(name, actor)

    async def _deliver(self, name: str, actor: str) -> None:
        body = json.dumps({"id": name, "type": TYPE, "actor": actor})
        while True:
            assert self._process.federation is not None
            parts = self._process.federation.activitypub
            assert parts is not None
            try:
                await parts.received.keep(
                    activity_hash=sha256(name.encode()).hexdigest(),
                    activity_id=name,
                    type=TYPE,
                    actor=actor,
                    text=body,
                )
                return
            except (SQLAlchemyError, WorkersError):
                await asyncio.sleep(AGAIN_AFTER)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Let the processes of this world have the function of the application."""
        HANDLERS.on(TYPE)(self._handle)
        try:
            yield
        finally:
            HANDLERS._by_type.pop(TYPE)

    async def _handle(self, session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        name, loop = str(activity.id), asyncio.get_running_loop()
        planned = self._planned[name]
        await session.execute(text("INSERT INTO simulated_effects VALUES (:at, :id)"), {"at": loop.time(), "id": name})
        self._tried[name] += 1
        if planned.death is not None and name not in self._died:
            self._died.add(name)
            die = this_process().dies
            if planned.death is Death.BEFORE:
                die(name)
            else:
                loop.call_soon(die, name)  # its transaction does not let anybody else run
        if self._tried[name] <= planned.raises or planned.raises >= ATTEMPTS:
            raise ValueError(name)


def handled_once(world: World) -> Iterator[str]:
    """What is stored was handled, once in effect, in its actor's order; or has failed, as was planned."""
    states = dict(world.space.rows("SELECT activity_id, state FROM activitypub_received"))
    numbers = dict(world.space.rows("SELECT activity_id, number FROM activitypub_received"))
    effects = world.space.rows("SELECT activity_id FROM simulated_effects ORDER BY rowid")
    counts = Counter(name for (name,) in effects)
    for each in world.stored:
        fails = each.planned.raises >= ATTEMPTS
        wanted, times = ("failed", 0) if fails else ("done", 1)
        state = states.get(each.activity_id)
        if state != wanted or counts[each.activity_id] != times:
            yield (
                f"{each.activity_id}, stored at {moment(each.at)}, is {state} and had its effect"
                f" {counts[each.activity_id]} times, not {wanted} and {times} times"
            )
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for (name,) in effects:
        lines[name.rpartition("/")[0]].append(name)
    for line in lines.values():
        for earlier, later in pairwise(line):
            if numbers.get(later, 0) < numbers.get(earlier, 0):
                yield f"{later} arrived before {earlier}, and had its effect after it"


def handled_late(world: World, now: float) -> Iterator[str]:
    """What has been stored for long and is not handled, though nothing of ours has failed for as long."""
    if world.in_trouble(now - LONGEST, now):
        return
    waiting = {name for (name,) in world.space.rows("SELECT activity_id FROM activitypub_received WHERE state = 'new'")}
    for each in world.stored:
        if each.at < now - LONGEST and each.activity_id in waiting:
            yield f"{each.activity_id}, stored at {moment(each.at)}, still waits at {moment(now)}"
