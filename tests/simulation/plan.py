"""What happens in a world: everything that a seed decides before it begins."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

MINUTE: Final = 60.0
HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
WEEK: Final = 7 * DAY
QUIET: Final = 26 * HOUR
END: Final = WEEK + QUIET
RUSH: Final = 10 * MINUTE
"""When everybody is written to at once; before that all have answered once."""
TO_SICK: Final = 24
"""Within `FALLING` seconds, the time that links need to go down: more than twice as many as there are slots."""
TO_HEALTHY: Final = 40
FALLING: Final = 20.0
SILENCE: Final = 5 * MINUTE


class Trouble(StrEnum):
    """What is wrong with a server for a while."""

    REFUSES = "refuses connections"
    HANGS = "takes requests and never answers"
    RESETS = "resets connections, now and then after applying"
    FAILS = "answers 500"
    BAD_GATEWAY = "is a proxy's page, 502"
    MAINTENANCE = "is a maintenance page, 503"
    ASKS_TO_WAIT = "answers 503 with Retry-After"
    LIMITS = "answers 429"
    MISSING = "is a hoster's page, 404"
    PARKED = "is a hoster's page, 200"
    SLOW = "answers after seconds"
    CENSORED = "has no name here, but has one for others"
    OTHER_KEYS = "shows and uses other keys"


PERMANENT: Final = (Trouble.REFUSES, Trouble.HANGS, Trouble.BAD_GATEWAY, Trouble.OTHER_KEYS)
"""What a server may suffer to the end."""
STRANGERS: Final = (Trouble.MISSING, Trouble.PARKED, Trouble.OTHER_KEYS)
"""With these somebody else answers: who meets a server so takes that for the server."""
TAKES_DELIVERIES: Final = (Trouble.SLOW, Trouble.CENSORED)
"""With these a server gets what is sent to it all the same."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One trouble of one server, in seconds of the loop; `value` is how slow, or how long to wait."""

    start: float
    end: float
    trouble: Trouble
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """A server as the world makes it; `latency` is how long it usually takes."""

    number: int
    latency: float
    is_known: bool
    phases: tuple[Phase, ...] = ()

    @property
    def is_sick(self) -> bool:
        return bool(self.phases)


@dataclass(frozen=True, slots=True)
class PlannedDelivery:
    """What the application owes at `at`, to one server or to several at once."""

    at: float
    servers: tuple[int, ...]
    ordering_key: str | None = None
    is_poison: bool = False


@dataclass(frozen=True, slots=True)
class Outage:
    """The database or the queue does not answer."""

    start: float
    end: float
    of_queue: bool


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker process dies and is started again after `pause`."""

    at: float
    process: int
    pause: float


@dataclass(frozen=True, slots=True)
class ClockJump:
    """The clock of the node's machine is set by so many seconds, back if it is less than 0."""

    at: float
    by: float


class Deed(StrEnum):
    """What an operator does to a server, whatever is held for it."""

    FORGETS = "forgets it"
    BLACKLISTS = "blacklists it for a while"


@dataclass(frozen=True, slots=True)
class Meddling:
    """An operator's deed; what ends, ends at `end`."""

    at: float
    end: float
    server: int
    deed: Deed


@dataclass(frozen=True, slots=True)
class PlannedFollow:
    """A user who follows somebody on a server, thinks better of it, follows again, and so on at each of `times`."""

    server: int
    times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A world before it begins."""

    seed: int
    servers: tuple[PlannedServer, ...]
    deliveries: tuple[PlannedDelivery, ...]
    outages: tuple[Outage, ...] = ()
    kills: tuple[Kill, ...] = ()
    processes: int = 2
    end: float = END
    sick: frozenset[int] = field(default_factory=frozenset)
    jumps: tuple[ClockJump, ...] = ()
    meddlings: tuple[Meddling, ...] = ()
    follows: tuple[PlannedFollow, ...] = ()

    def set_forward(self, since: float) -> float:
        """By how much older what began then looks to the node than it is, at most."""
        return sum(max(jump.by, 0.0) for jump in self.jumps if jump.at >= since)

    def rush(self) -> Plan:
        """The world's servers when all its sick ones fall silent while everybody is written to, by one process."""
        chance = random.Random(f"{self.seed} {len(self.servers)} rush")
        sick = sorted(self.sick)
        healthy = [server.number for server in self.servers if not server.is_sick]
        greetings = [PlannedDelivery(chance.uniform(0, MINUTE), (server.number,)) for server in self.servers]
        lost = [PlannedDelivery(RUSH + chance.uniform(0, FALLING), (each,)) for each in _in_turn(sick, TO_SICK)]
        sent = [
            PlannedDelivery(RUSH + chance.uniform(0, 2 * FALLING), (each,)) for each in _in_turn(healthy, TO_HEALTHY)
        ]
        silence = Phase(RUSH, RUSH + SILENCE, Trouble.HANGS)
        return replace(
            self,
            servers=tuple(replace(each, phases=(silence,)) if each.is_sick else each for each in self.servers),
            deliveries=tuple(sorted((*greetings, *lost, *sent), key=lambda each: each.at)),
            outages=(),
            kills=(),
            jumps=(),
            meddlings=(),
            follows=(),
            processes=1,
            end=RUSH + SILENCE + QUIET,
        )

    def without_sick(self) -> Plan:
        """The same world, in which the sick servers are not."""
        deliveries = [
            replace(each, servers=tuple(number for number in each.servers if number not in self.sick))
            for each in self.deliveries
            if not each.is_poison
        ]
        return replace(
            self,
            servers=tuple(server for server in self.servers if not server.is_sick),
            deliveries=tuple(each for each in deliveries if each.servers),
        )


def _in_turn(numbers: list[int], count: int) -> list[int]:
    return [numbers[index % len(numbers)] for index in range(count)] if numbers else []


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
            kills=tuple(self._kill(chance.choice(moments)) for _ in range(chance.choice((0, 1, 2, 3)))),
            sick=frozenset(server.number for server in planned if server.is_sick),
        )

    def _server(self, number: int) -> PlannedServer:
        """Nothing is wrong in the first minute: pages of hosters count as trouble only of servers that were met."""
        chance = self._chance
        is_sick = chance.random() < 0.35
        phases: list[Phase] = []
        if is_sick:
            for _ in range(chance.choice((1, 1, 2))):
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
        shortest, longest = (6 * HOUR, 3 * DAY) if chance.random() < 0.08 else (5.0, 6 * HOUR)
        length = math.exp(chance.uniform(math.log(shortest), math.log(longest)))
        start = chance.uniform(MINUTE, WEEK - length)
        trouble = chance.choice(list(Trouble))
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
        if chance.random() < 0.25:
            found.append(PlannedDelivery(chance.uniform(0, WEEK), (chance.randrange(len(servers)),), is_poison=True))
        return found

    def _during(self, server: PlannedServer, phase: Phase) -> list[PlannedDelivery]:
        """Some that fall due while the server is in trouble."""
        chance = self._chance
        end = min(phase.end, WEEK)
        return [
            PlannedDelivery(chance.uniform(phase.start, end), (server.number,))
            for _ in range(chance.choice((1, 1, 2, 3)))
        ]

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
