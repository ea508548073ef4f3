"""What happens in a world: everything that a seed decides before it begins."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from federation.activitypub.signatures import SignatureKind

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
    HANGS_ON_POSTS = "shows who it is, and takes deliveries without ever answering"
    RESETS_ON_POSTS = "shows who it is, and resets deliveries, now and then after applying"
    BREAKS_US = "answers deliveries in a way that our own code cannot bear"
    CENSORED = "has no name here, but has one for others"
    OTHER_KEYS = "shows and uses other keys"
    NAMELESS = "has no name"
    GONE = "has no inbox any more, 410"
    REFUSES_US = "takes no signature of ours, 401"
    LACKS_OUR_KEY = "cannot fetch our key, 401"


OF_ACTIVITIES: Final = (Trouble.NAMELESS, Trouble.GONE, Trouble.REFUSES_US, Trouble.LACKS_OUR_KEY)
"""What may be wrong with a server that takes activities, and with no other."""

PERMANENT: Final = (Trouble.REFUSES, Trouble.HANGS, Trouble.BAD_GATEWAY, Trouble.OTHER_KEYS)
"""What a server may suffer to the end."""
STRANGERS: Final = (Trouble.MISSING, Trouble.PARKED, Trouble.OTHER_KEYS)
"""With these somebody else answers: who meets a server so takes that for the server."""
SILENT: Final = (Trouble.HANGS, Trouble.HANGS_ON_POSTS)
"""With these a server never answers."""
TAKES_DELIVERIES: Final = (Trouble.SLOW, Trouble.CENSORED)
"""With these a server gets what is sent to it all the same."""


REFUSES_ONE: Final = 410
"""Of the statuses for one delivery that which is the server's own answer; the others are pages of a proxy."""
FORBIDS_ONE: Final = 403
"""The same of a server that takes activities."""
NOT_FOUND, GONE = 404, 410
LOST_INBOXES: Final = {"missing": NOT_FOUND, "gone": GONE}
"""Users of servers that take activities, and what their own inboxes answer."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One trouble of one server, in seconds of the loop; `value` is how slow, or how long to wait."""

    start: float
    end: float
    trouble: Trouble
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Receiver:
    """How a server takes activities: signed by one of these kinds, or else it answers with `unsigned`.

    Some answer with a page to what they take.
    """

    kinds: frozenset[SignatureKind]
    unsigned: int = 401
    shows_page: bool = False


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """A server as the world makes it; `latency` is how long it usually takes. `receiver`: it takes activities alone."""

    number: int
    latency: float
    is_known: bool
    phases: tuple[Phase, ...] = ()
    receiver: Receiver | None = None

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
    page: int | None = None
    """The status with which its server answers this delivery, and no other: None, it takes it. See `REFUSES_ONE`."""
    user: str | None = None
    """Whose own inbox it is for; None, the inbox that the server's users share. See `LOST_INBOXES`."""


class Death(StrEnum):
    """When a process dies over an activity that it handles."""

    BEFORE = "before its transaction ends"
    AFTER = "after that"


@dataclass(frozen=True, slots=True)
class PlannedArrival:
    """What an actor of a server sends to us. The function that handles it raises so many times, and once its process
    dies over it. The sender comes `again`, as if it had not been told that it is stored."""

    at: float
    server: int
    raises: int = 0
    death: Death | None = None
    again: float | None = None


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
class LastRequest:
    """A worker process dies of no delivery's fault, while its `number`-th request to a server is under way."""

    server: int
    number: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """A worker process stands still from `at` to `end`, and then goes on as if nothing had been."""

    at: float
    end: float
    process: int


@dataclass(frozen=True, slots=True)
class ClockJump:
    """The clock of the node's machine is set by so many seconds, back if it is less than 0.

    With a `process` only that process has the wrong clock: it has a machine of its own.
    """

    at: float
    by: float
    process: int | None = None


class Deed(StrEnum):
    """What an operator does to a server, whatever is held for it."""

    FORGETS = "forgets it"
    BLACKLISTS = "blacklists it for a while"
    HOLDS = "holds what is sent to it for a while"


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
    own_machines: bool = False
    """The processes run on machines of their own, and the database is a server with a clock that is right. Otherwise
    all of them, and the database, have one clock."""
    meddlings: tuple[Meddling, ...] = ()
    follows: tuple[PlannedFollow, ...] = ()
    last_requests: tuple[LastRequest, ...] = ()
    freezes: tuple[Freeze, ...] = ()
    losses: tuple[float, ...] = ()
    """When the queue loses all that it has."""
    is_plain: bool = False
    """Posts are sent by another wire, which knows no keys, no page of a stranger, and no question but a delivery."""
    hidden: tuple[tuple[float, float], ...] = ()
    """When nobody can fetch our actor."""
    arrivals: tuple[PlannedArrival, ...] = ()

    @property
    def has_activities(self) -> bool:
        return any(server.receiver is not None for server in self.servers)

    def plain(self) -> Plan:
        """The same world by that wire, whose servers have none of the troubles that it cannot tell from being well."""
        return replace(
            self,
            servers=tuple(replace(each, phases=tuple(map(_plainly, each.phases))) for each in self.servers),
            follows=(),
            is_plain=True,
        )

    def set_forward(self, since: float) -> float:
        """By how much older what began then looks to the node than it is, at most."""
        return sum(max(jump.by, 0.0) for jump in self.jumps if jump.at >= since and jump.process is None)

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
            last_requests=(),
            freezes=(),
            losses=(),
            hidden=(),
            arrivals=(),
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


def _plainly(phase: Phase) -> Phase:
    return replace(phase, trouble=Trouble.BAD_GATEWAY) if phase.trouble in STRANGERS else phase


def _in_turn(numbers: list[int], count: int) -> list[int]:
    return [numbers[index % len(numbers)] for index in range(count)] if numbers else []
