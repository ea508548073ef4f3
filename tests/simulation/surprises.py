"""What happens in some worlds beside outages: clocks, operators, users, and processes that die or stand still."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import accumulate

from tests.simulation.plan import (
    DAY,
    HOUR,
    MINUTE,
    SILENT,
    STRANGERS,
    WEEK,
    ClockJump,
    Deed,
    Freeze,
    LastRequest,
    Meddling,
    Phase,
    Plan,
    PlannedDelivery,
    PlannedFollow,
    PlannedServer,
    Trouble,
)


def with_surprises(plan: Plan) -> Plan:
    """The plan, and what its seed decides besides."""
    chance = random.Random(f"{plan.seed} {len(plan.servers)} surprises")
    own_machines = chance.random() < 1 / 3
    jumps = _wrong_clocks(chance) if own_machines else _jumps(chance, plan)
    meddlings = _meddlings(chance, plan)
    meanwhile = [PlannedDelivery(chance.uniform(each.at, each.end), (each.server,)) for each in meddlings]
    forgotten = {each.server for each in meddlings if each.deed is Deed.FORGETS}
    return replace(
        plan,
        servers=tuple(_slow_since(each, plan.seed) for each in plan.servers),
        deliveries=tuple(sorted((*plan.deliveries, *meanwhile), key=lambda each: each.at)),
        jumps=jumps,
        own_machines=own_machines,
        meddlings=meddlings,
        follows=_follows(chance, plan, forgotten),
        last_requests=_last_requests(chance, plan),
        freezes=_freezes(chance, plan),
        losses=_losses(chance, plan),
    )


def _slow_since(server: PlannedServer, seed: int) -> PlannedServer:
    """Half of the servers that were silent come back slow, and stay so: what waits for them must let them answer."""
    chance = random.Random(f"{seed} {server.number} slow")
    last = max(server.phases, key=lambda each: each.end, default=None)
    if last is None or last.trouble not in SILENT or last.end == math.inf or chance.random() < 0.5:
        return server
    slow = Phase(last.end, math.inf, Trouble.SLOW, round(chance.uniform(6, 9), 1))  # a discovery may take 10 s
    return replace(server, phases=(*server.phases, slow))


def _last_requests(chance: random.Random, plan: Plan) -> tuple[LastRequest, ...]:
    """Processes that die in the middle of an attempt or of a look, at servers that are sick."""
    sick = sorted(plan.sick)
    return tuple(
        LastRequest(chance.choice(sick), chance.randint(1, 12)) for _ in range(chance.choice((0, 1, 2, 3))) if sick
    )


def _freezes(chance: random.Random, plan: Plan) -> tuple[Freeze, ...]:
    """Half of all worlds have one, for longer than a lease, just when something is to be sent."""
    if chance.random() > 0.5:
        return ()
    at = _when_owed(chance, plan) + chance.uniform(0, 0.2)
    return (Freeze(at, at + _between(chance, 40, 20 * MINUTE), chance.randrange(2)),)


def _losses(chance: random.Random, plan: Plan) -> tuple[float, ...]:
    """A third of all worlds have one, just when something waits in the queue, or is under way."""
    return (_when_owed(chance, plan) + chance.uniform(0, 20),) if chance.random() < 1 / 3 else ()


def _when_owed(chance: random.Random, plan: Plan) -> float:
    return chance.choice(plan.deliveries).at


def _jumps(chance: random.Random, plan: Plan) -> tuple[ClockJump, ...]:
    """A third of all worlds have one, within the longest trouble of a server; half of those clocks are set right again
    before that is over, so that what was to happen then lies too far off.
    """
    if chance.random() > 1 / 3:
        return ()
    by = chance.choice((_between(chance, MINUTE, DAY), 3 * DAY, 8 * DAY)) * chance.choice((-1, 1))
    troubles = ((phase.start, min(phase.end, WEEK)) for server in plan.servers for phase in server.phases)
    start, end = max(troubles, key=lambda each: each[1] - each[0], default=(MINUTE, WEEK))
    first, second = sorted(chance.uniform(start, end) for _ in range(2))
    return (ClockJump(first, by), ClockJump(second, -by)) if chance.random() < 0.5 else (ClockJump(first, by),)


def _wrong_clocks(chance: random.Random) -> tuple[ClockJump, ...]:
    """One process has a wrong clock from the beginning, and now and then one is set."""
    wrong = ClockJump(0.0, _off(chance), chance.randrange(2))
    later = (ClockJump(chance.uniform(0, WEEK), _off(chance), chance.randrange(2)) for _ in range(2))
    return (wrong, *(each for each in later if chance.random() < 0.5))


def _off(chance: random.Random) -> float:
    return _between(chance, 10, 30 * DAY) * chance.choice((-1, 1))


def _meddlings(chance: random.Random, plan: Plan) -> tuple[Meddling, ...]:
    """Up to three servers of twenty, sick ones first, about when something is held for them.

    None behind whose name a stranger answers some day: who forgot it would take the stranger for it, and be right.
    """
    fit = [each for each in plan.servers if each.is_known and not any(p.trouble in STRANGERS for p in each.phases)]
    fit = [each for each in fit if each.is_sick] or fit
    chosen = chance.sample(fit, min(len(fit), max(3 * len(plan.servers) // 20, 1)))
    return tuple(_meddling(chance, server) for server in chosen if chance.random() < 0.6)


def _meddling(chance: random.Random, server: PlannedServer) -> Meddling:
    phase = chance.choice(server.phases) if server.phases else None
    start, end = (phase.start, min(phase.end, WEEK)) if phase else (MINUTE, WEEK)
    at = chance.uniform(start, end)
    return Meddling(at, at + _between(chance, 5 * MINUTE, DAY), server.number, chance.choice(list(Deed)))


def _follows(chance: random.Random, plan: Plan, forgotten: set[int]) -> tuple[PlannedFollow, ...]:
    """Of some servers, sick ones first; who forgets a server forgets its follows, and tells nobody."""
    known = [server for server in plan.servers if server.is_known and server.number not in forgotten]
    known = [server for server in known if server.is_sick] or known
    chosen = chance.sample(known, min(len(known), max(len(plan.servers) // 10, 1)))
    return tuple(_follow(chance, server) for server in chosen)


def _follow(chance: random.Random, server: PlannedServer) -> PlannedFollow:
    edges = [edge for phase in server.phases for edge in (phase.start, phase.end) if edge < WEEK - HOUR]
    # About when a trouble begins or ends: the older ones wait for their next attempt, and the younger need not.
    start = max(chance.choice(edges) - chance.uniform(-5, 60), 1.0) if edges else chance.uniform(1, WEEK - HOUR)
    pauses = [_pause(chance) for _ in range(chance.randint(1, 3))]
    return PlannedFollow(server.number, tuple(accumulate(pauses, initial=start)))


def _pause(chance: random.Random) -> float:
    return chance.choice((0.05, chance.uniform(0, 3), chance.uniform(0, 60), chance.uniform(0, 600)))


def _between(chance: random.Random, shortest: float, longest: float) -> float:
    return math.exp(chance.uniform(math.log(shortest), math.log(longest)))
