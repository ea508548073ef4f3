"""Makes the plan of a world of its seed: its servers, their troubles, and what is owed to whom and when."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Final

from tests.simulation.plan import (
    DAY,
    HOUR,
    MINUTE,
    OF_ACTIVITIES,
    PERMANENT,
    REFUSES_ONE,
    STRANGERS,
    WEEK,
    Kill,
    Outage,
    Phase,
    Plan,
    PlannedDelivery,
    PlannedServer,
    Trouble,
)

MANY: Final = 16
"""So many are owed at once that their release takes several steps."""
TOO_LARGE: Final = 413
PAGES_FOR_ONE: Final = (TOO_LARGE, 500)
"""What a server answers to one delivery, and to no other: it is too large, or of a kind that makes its code fail."""
SILENT: Final = (Trouble.REFUSES, Trouble.HANGS, Trouble.BAD_GATEWAY, Trouble.MAINTENANCE, Trouble.HANGS_ON_POSTS)
"""With these nothing that is sent to a server tells what it will say to it later."""
DRAWN: Final = tuple(trouble for trouble in Trouble if trouble not in OF_ACTIVITIES)
TRIES_OF_ONE: Final = (
    *((6.0 * number) for number in range(16)),
    *((11 * MINUTE + 25.0 * number) for number in range(6)),
    *((73 * MINUTE + 30.0 * number) for number in range(6)),
    *((7.2 * HOUR + 120.0 * number) for number in range(6)),
)
"""When others are owed to the server of a delivery that fails alone: about while it is tried."""


def make_plan(seed: int, servers: int) -> Plan:
    """The world of a seed, with so many servers."""
    return _Planner(random.Random(f"{seed} {servers}"), seed, servers).plan()


class _Planner:
    def __init__(self, chance: random.Random, seed: int, count: int) -> None:
        self._chance = chance
        self._seed = seed
        self._count = count

    def plan(self) -> Plan:
        chance = self._chance
        planned = [self._server(number) for number in range(self._count)]
        deliveries = self._deliveries(planned)
        moments = [each.at for each in deliveries]
        return Plan(
            seed=self._seed,
            servers=tuple(planned),
            deliveries=tuple(sorted(deliveries, key=lambda each: each.at)),
            outages=tuple(self._outage(chance.choice(moments)) for _ in range(chance.choice((0, 1, 1, 2)))),
            kills=tuple(self._kill(chance.choice(moments)) for _ in range(chance.choice((0, 1, 2, 4)))),
            sick=frozenset(server.number for server in planned if server.is_sick),
        )

    def _server(self, number: int) -> PlannedServer:
        """Nothing is wrong in the first minute: pages of hosters count as trouble only of servers that were met."""
        chance = self._chance
        is_sick = chance.random() < 0.2
        phases: list[Phase] = []
        if is_sick:
            for _ in range(chance.choice((1, 1, 1, 2))):
                phases = self._with_phase(phases)
            if chance.random() < 0.06:
                start = chance.uniform(MINUTE, WEEK)
                phases = [each for each in phases if each.end < start]
                phases.append(Phase(start, math.inf, chance.choice(PERMANENT)))
        return PlannedServer(
            number=number,
            latency=chance.uniform(0.02, 0.2),
            is_known=chance.random() < 0.85,
            phases=tuple(sorted(phases, key=lambda phase: phase.start)),
        )

    def _with_phase(self, phases: list[Phase]) -> list[Phase]:
        """One more, if it does not overlap with another."""
        chance = self._chance
        shortest, longest = (4 * HOUR, 3 * DAY) if chance.random() < 0.06 else (5.0, 4 * HOUR)
        length = math.exp(chance.uniform(math.log(shortest), math.log(longest)))
        start = chance.uniform(MINUTE, WEEK - length)
        trouble = chance.choice(DRAWN)
        if trouble is Trouble.BREAKS_US:
            length = min(length, 2 * HOUR)
        value = {
            Trouble.SLOW: chance.uniform(1.5, 12),
            Trouble.ASKS_TO_WAIT: max(chance.uniform(5, 4 * HOUR), length / 20),
            Trouble.LIMITS: chance.choice((0.0, max(chance.uniform(2, 1800), length / 20))),
        }.get(trouble, 0.0)
        if any(start < each.end and each.start < start + length for each in phases):
            return phases
        return [*phases, Phase(start, start + length, trouble, round(value, 1))]

    def _deliveries(self, servers: list[PlannedServer]) -> list[PlannedDelivery]:
        chance = self._chance
        found: list[PlannedDelivery] = []
        for server in servers:
            found += [
                PlannedDelivery(chance.uniform(0, WEEK), (server.number,)) for _ in range(chance.choice((1, 1, 1, 2)))
            ]
            if any(phase.trouble in STRANGERS for phase in server.phases):
                found.append(PlannedDelivery(chance.uniform(0, 30), (server.number,)))
            for phase in server.phases:
                found += self._during(server, phase)
        sick = [server.number for server in servers if server.phases] or [0]
        for number in [*chance.choices(sick, k=max(len(servers) // 10, 1)), chance.randrange(len(servers))]:
            found += self._in_order(number, servers[number])
        for _ in range(max(len(servers) // 20, 1)):
            some = chance.sample(range(len(servers)), min(6, len(servers)))
            found.append(PlannedDelivery(chance.uniform(0, WEEK), tuple(some)))
        for _ in range(chance.choice((0, 0, 0, 0, 1, 2))):
            found += self._poison(servers)
        if chance.random() < 0.5:
            found += self._refused(servers)
        for status in PAGES_FOR_ONE:
            if chance.random() < 0.4:
                found += self._one_page(servers, status)
        return found

    def _during(self, server: PlannedServer, phase: Phase) -> list[PlannedDelivery]:
        """Some that fall due while the server is in trouble, now and then many."""
        chance = self._chance
        end = min(phase.end, WEEK)
        return [
            PlannedDelivery(chance.uniform(phase.start, end), (server.number,))
            for _ in range(chance.choice((1, 1, 1, 2, 2, 3, MANY)))
        ]

    def _poison(self, servers: list[PlannedServer]) -> list[PlannedDelivery]:
        """One that crashes whoever sends it, and some that are under way just then, each time, at a slow server."""
        chance = self._chance
        at, number = chance.uniform(MINUTE, WEEK - HOUR), chance.randrange(len(servers))
        found = [PlannedDelivery(at, (number,), is_poison=True)]
        slow = chance.randrange(len(servers))
        phase = Phase(at - MINUTE, at + HOUR, Trouble.SLOW, round(chance.uniform(6, 12), 1))
        if slow != number and not servers[slow].phases and chance.random() < 0.7:
            servers[slow] = replace(servers[slow], phases=(phase,))
            found += [PlannedDelivery(at - 0.2 * count, (slow,)) for count in range(3)]
        return found

    def _refused(self, servers: list[PlannedServer]) -> list[PlannedDelivery]:
        """One that its server refuses by itself, and owed while it is away, so that it is sent ahead of others."""
        chance = self._chance
        phases = [(each, phase) for each in servers for phase in each.phases if phase.trouble in SILENT]
        if not phases:
            return []
        server, phase = chance.choice(phases)
        end = min(phase.end, WEEK)
        moments = sorted(chance.uniform(phase.start, end) for _ in range(4))
        first = PlannedDelivery(moments[0], (server.number,), page=REFUSES_ONE)
        return [first, *(PlannedDelivery(at, (server.number,)) for at in moments[1:])]

    def _one_page(self, servers: list[PlannedServer], status: int) -> list[PlannedDelivery]:
        """One delivery that a server answers with a page, and others around each of its tries, if there are any.

        The server is in no trouble of its own, nor will it be, so that nothing but this one delivery can be at fault.
        """
        chance = self._chance
        well = [server.number for server in servers if not server.is_sick]
        if not well:
            return []
        number, at = chance.choice(well), chance.uniform(MINUTE, WEEK - 12 * HOUR)
        if chance.random() < 0.8:
            others = [PlannedDelivery(at + after, (number,)) for after in TRIES_OF_ONE]
            line = f"object-{number}-{at:.0f}" if status == TOO_LARGE else None
            behind = [PlannedDelivery(at + 1, (number,), line)] if line is not None else []
            return [PlannedDelivery(at, (number,), line, page=status), *behind, *others]
        # Where a server takes nothing else it is away, for as long as this world lasts.
        return [PlannedDelivery(max(at, WEEK - DAY), (number,), page=status)]

    def _in_order(self, number: int, server: PlannedServer) -> list[PlannedDelivery]:
        """Several of one key: create, update, update, delete."""
        chance = self._chance
        edges = [edge for phase in server.phases for edge in (phase.start, phase.end) if edge < WEEK - HOUR]
        # About when a trouble begins or ends, for then the older ones wait and the younger need not.
        start = max(chance.choice(edges) - chance.uniform(5, 60), 0.0) if edges else chance.uniform(0, WEEK - HOUR)
        times = sorted(start + chance.uniform(0, chance.choice((1, 90, 1200))) for _ in range(chance.randint(2, 4)))
        return [PlannedDelivery(at, (number,), ordering_key=f"object-{number}-{start:.0f}") for at in times]

    def _outage(self, near: float) -> Outage:
        chance = self._chance
        start = max(near + chance.uniform(-5, 1), 1.0)
        length = math.exp(chance.uniform(math.log(2), math.log(10 * MINUTE)))
        return Outage(start, start + length, of_queue=chance.random() < 0.5)

    def _kill(self, near: float) -> Kill:
        chance = self._chance
        return Kill(at=near + chance.uniform(0, 0.3), process=chance.randrange(2), pause=chance.uniform(1, 60))
