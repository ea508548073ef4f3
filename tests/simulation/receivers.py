"""The same world with ActivityPub: half of its servers take activities, each in its own way, and nothing else."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Final

from federation.activitypub.signatures import SignatureKind
from tests.simulation.arrivals import arrivals_of
from tests.simulation.plan import (
    FORBIDS_ONE,
    HOUR,
    LOST_INBOXES,
    MINUTE,
    REFUSES_ONE,
    WEEK,
    Phase,
    Plan,
    PlannedDelivery,
    PlannedServer,
    Receiver,
    Trouble,
)

KINDS: Final = (
    frozenset({SignatureKind.CAVAGE}),
    frozenset({SignatureKind.RFC9421}),
    frozenset(SignatureKind),
)
INSTEAD: Final = {
    Trouble.CENSORED: (Trouble.NAMELESS, Trouble.PARKED),
    Trouble.OTHER_KEYS: (Trouble.REFUSES_US,),
    Trouble.MISSING: (Trouble.MISSING, Trouble.GONE),
    Trouble.HANGS_ON_POSTS: (Trouble.REFUSES_US, Trouble.GONE),
    Trouble.RESETS_ON_POSTS: (Trouble.RESETS, Trouble.MISSING),
}
"""What a server has in place of a trouble that comes with keys and with questions, of which it has none."""
SLOWEST: Final = 6.0
"""Of a server that has to be knocked at twice: both answers fit into the time of an attempt."""


def with_activities(plan: Plan) -> Plan:
    """The plan in which some servers take activities alone, and have the troubles of such servers."""
    chance = random.Random(f"{plan.seed} {len(plan.servers)} activities")
    hidden = _hidden(chance)
    servers = tuple(_receiving(chance, each, hidden) if chance.random() < 0.5 else each for each in plan.servers)
    takers = {each.number for each in servers if each.receiver is not None}
    deliveries = [_delivered(each, takers) for each in plan.deliveries]
    deliveries += [each for server in servers for each in _meanwhile(chance, server)]
    deliveries += _to_lost_inboxes(chance, servers)
    return replace(
        plan,
        servers=servers,
        deliveries=tuple(sorted(deliveries, key=lambda each: each.at)),
        follows=tuple(each for each in plan.follows if each.server not in takers),
        sick=frozenset(each.number for each in servers if each.is_sick),
        hidden=hidden,
        arrivals=arrivals_of(chance, plan, sorted(takers)),
    )


def _hidden(chance: random.Random) -> tuple[tuple[float, float], ...]:
    """Half of all worlds have a time in which nobody can fetch our actor."""
    if chance.random() < 0.5:
        return ()
    start = chance.uniform(HOUR, WEEK - 6 * HOUR)
    return ((start, start + math.exp(chance.uniform(math.log(MINUTE), math.log(6 * HOUR)))),)


def _receiving(chance: random.Random, server: PlannedServer, hidden: tuple[tuple[float, float], ...]) -> PlannedServer:
    receiver = Receiver(
        kinds=chance.choice(KINDS), unsigned=chance.choice((400, 401, 401)), shows_page=chance.random() < 0.2
    )
    phases = [_phase(chance, each, receiver) for each in server.phases]
    for start, end in hidden if chance.random() < 0.4 else ():
        if not any(start < each.end and each.start < end for each in phases):
            phases.append(Phase(start, end, Trouble.LACKS_OUR_KEY))
    phases.sort(key=lambda each: each.start)
    return replace(server, is_known=True, phases=tuple(phases), receiver=receiver)


def _phase(chance: random.Random, phase: Phase, receiver: Receiver) -> Phase:
    """The trouble as a server has it that takes activities."""
    trouble = chance.choice(INSTEAD.get(phase.trouble, (phase.trouble,)))
    if trouble is Trouble.PARKED and receiver.shows_page:  # nobody can tell one page from another
        trouble = Trouble.BAD_GATEWAY
    slowest = phase.value if SignatureKind.CAVAGE in receiver.kinds else SLOWEST
    value = min(phase.value, slowest) if trouble is Trouble.SLOW else phase.value
    return replace(phase, trouble=trouble, value=value)


def _meanwhile(chance: random.Random, server: PlannedServer) -> list[PlannedDelivery]:
    """One before anybody else answers in the server's name, and some while it lacks our key."""
    found: list[PlannedDelivery] = []
    for phase in server.phases if server.receiver is not None else ():
        if phase.trouble is Trouble.PARKED:
            found.append(PlannedDelivery(chance.uniform(0, 30), (server.number,)))
        elif phase.trouble is Trouble.LACKS_OUR_KEY:
            times = (chance.uniform(phase.start, phase.end) for _ in range(chance.choice((1, 1, 2, 3))))
            found += [PlannedDelivery(at, (server.number,)) for at in times]
    return found


def _delivered(planned: PlannedDelivery, takers: set[int]) -> PlannedDelivery:
    is_taken = planned.servers[0] in takers
    return replace(planned, page=FORBIDS_ONE) if is_taken and planned.page == REFUSES_ONE else planned


def _to_lost_inboxes(chance: random.Random, servers: tuple[PlannedServer, ...]) -> list[PlannedDelivery]:
    """Some to inboxes that are lost, of servers with which nothing is wrong."""
    well = [each.number for each in servers if each.receiver is not None and not each.is_sick]
    found: list[PlannedDelivery] = []
    for user, status in LOST_INBOXES.items() if well else ():
        number = chance.choice(well)
        times = (chance.uniform(0, HOUR), *(chance.uniform(0, WEEK) for _ in range(3)))
        found += [PlannedDelivery(at, (number,), page=status, user=user) for at in times]
    return found
