"""What is well is quick: nobody waits for a delivery to a server that takes it, or for a recurring job that is due."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from tests.simulation.owing import Owed
from tests.simulation.plan import (
    END,
    HOUR,
    MINUTE,
    NOT_FOUND,
    QUIET,
    STRANGERS,
    TAKES_DELIVERIES,
    Phase,
    Trouble,
)
from tests.simulation.records import MishapKind, Past, RowChange, Turn, moment_of
from tests.simulation.servers import SimulatedServer
from tests.simulation.story import moment
from tests.simulation.world import World

SOON: Final = MINUTE
AMONG_PAGES: Final = 5 * MINUTE
"""Where a server fails at one delivery in three intervals of ten seconds, and takes none meanwhile, its link falls."""
DENSE: Final = 80.0
LOOKS: Final = 24
BACK: Final = 5 * MINUTE
TRIED_LATER: Final = (500, NOT_FOUND)
"""A server that answers so to one delivery alone may take it some day."""
SERIES: Final = 3
RESTING: Final = (Trouble.LIMITS, Trouble.ASKS_TO_WAIT)
"""These say themselves how long they are away."""
REFUSING: Final = (Trouble.GONE, Trouble.REFUSES_US)
WELL_SINCE: Final = QUIET
"""A server that was in trouble may be looked at so rarely that a day passes."""
REGAINED: Final = 4 * MINUTE
"""Within this time all that a queue had lost is there again, and tried."""
EARLY: Final = 0.85
"""The part of a recurring job's interval that passes between two of its runs at least."""
INTERVALS: Final = {"outbox-sweep": 30.0, "long-range-probes": 60.0, "purge": HOUR, "storage-sweep": 10 * MINUTE}


def promptness(world: World, past: Past) -> Iterator[str]:
    """What took long, and need not have."""
    for owed in world.owed:
        yield from _delivery(world, owed)
        if owed.page is not None:
            yield from _alone(world, owed, past.rows.get(owed.delivery_id, ()))
    yield from _lines(world, past)
    for server in world.servers.values():
        yield from _returns(world, server)
    for job, turns in past.turns.items():
        for turn in turns:
            yield from _turn(world, job, turn)


def _delivery(world: World, owed: Owed) -> Iterator[str]:
    server = world.servers[owed.server]
    applied = server.first_applied.get(owed.activity_id, math.inf)
    if owed.is_poison or owed.page is not None or owed.ordering_key is not None or not server.planned.is_known:
        return
    is_well = all(phase.end < owed.at - WELL_SINCE or owed.at + SOON < phase.start for phase in server.planned.phases)
    was_banned = any(ban.server == owed.server and ban.start < owed.at + SOON for ban in world.bans)
    was_meddled = any(each.server == server.planned.number for each in world.plan.meddlings)
    soon = _soon(world, owed)
    if not is_well or was_banned or was_meddled or applied - owed.at <= soon:
        return
    others = [kind for kind in MishapKind if kind is not MishapKind.LOSS]
    if world.in_trouble(owed.at - 15 * MINUTE, owed.at + REGAINED, *others):
        return
    if any(owed.at - MINUTE < lost < owed.at + SOON and applied < lost + REGAINED for lost in world.plan.losses):
        return
    yield f"{owed.delivery_id} to {owed.server}, owed since {moment(owed.at)}, took {applied - owed.at:.0f} s"


def _alone(world: World, owed: Owed, changes: Sequence[RowChange]) -> Iterator[str]:
    """What a server fails at gets three more series; what is too large for it, or refused by it, gets none."""
    holds = sum((change.was, change.state, change.reason) == ("ready", "held", "alone") for change in changes)
    failed = [change for change in changes if change.state == "failed" and change.code == f"HTTP_{owed.page}"]
    if owed.page not in TRIED_LATER and holds:
        yield f"{owed.delivery_id}, which {owed.server} answers with {owed.page}, was held {holds} times for later"
    if owed.page in TRIED_LATER and failed and holds != SERIES and not world.in_trouble(owed.at, failed[0].at):
        yield f"{owed.delivery_id}, which {owed.server} fails at, was given up after {holds} more series"


def _lines(world: World, past: Past) -> Iterator[str]:
    """The next delivery of an ordering key is ready in the moment in which the one before it is over."""
    lines: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for owed in world.owed:
        if owed.ordering_key is not None:
            lines[owed.server, owed.ordering_key].append(owed.delivery_id)
    for older, younger in (pair for line in lines.values() for pair in pairwise(line)):
        over = next((each.at for each in past.rows[older] if each.state in ("gone", "failed", "expired")), math.inf)
        waits = [each for each in past.rows[younger] if each.at < over]
        is_next = bool(waits) and (waits[-1].state, waits[-1].reason) == ("held", "order")
        goes = next((each.at for each in past.rows[younger] if each.at >= over), math.inf)
        if is_next and goes > over and not world.in_trouble(over - MINUTE, over + 1):
            yield f"{younger} waits for {older}, which is over at {moment(over)}, until {moment(min(goes, END))}"


def _returns(world: World, server: SimulatedServer) -> Iterator[str]:
    """What a server was owed while it was away arrives soon after it is back, as looks come at least so often."""
    phases = server.planned.phases
    is_banned = any(each.server == server.planned.number for each in world.plan.meddlings)
    if is_banned or not server.planned.is_known:
        return
    for phase, after in zip(phases, (*phases[1:], None), strict=False):
        end = phase.end + _back_within(phase)
        is_next = after is not None and after.start < end
        if is_next or end > world.plan.end or world.in_trouble(phase.start - HOUR, end):
            continue
        for owed in world.owed:
            is_usual = not owed.is_poison and owed.page is None and owed.ordering_key is None
            applied = server.first_applied.get(owed.activity_id, math.inf)
            if owed.server == server.url and is_usual and phase.start - MINUTE < owed.at < phase.end and applied > end:
                gone = f"{phase.trouble} from {moment(phase.start)} to {moment(phase.end)}"
                yield f"{owed.delivery_id} to {owed.server} was applied at {moment(min(applied, END))}: it {gone}"


def _back_within(phase: Phase) -> float:
    """How long it takes at most until what was owed in this phase is there; infinite if that depends on more."""
    if phase.trouble in (*REFUSING, *RESTING, *STRANGERS, *TAKES_DELIVERIES):
        return math.inf
    if phase.trouble in (Trouble.BREAKS_US, Trouble.LACKS_OUR_KEY):
        return HOUR + BACK
    return 1.2 * max(2 * MINUTE, (phase.end - phase.start) / LOOKS) + BACK


def _soon(world: World, owed: Owed) -> float:
    """How long it may take: longer where the server fails at another one, and took others too rarely to be well."""
    pages = [each.at for each in world.owed if each.page is not None and each.server == owed.server]
    since = [owed.at - page for page in pages if page <= owed.at - DENSE]
    if since and world.in_trouble(owed.at - max(since), owed.at, MishapKind.CLOCK):
        return math.inf
    return max(AMONG_PAGES, 1.2 * max(since) / LOOKS) if since else SOON


def _turn(world: World, job: str, turn: Turn) -> Iterator[str]:
    """One process at a time runs a recurring job, and never twice within its interval."""
    if world.in_trouble(turn.at - HOUR, turn.at, MishapKind.CLOCK):
        return
    now = world.space.clock.shown(turn.at)
    if turn.leased_until_before is not None and (moment_of(turn.leased_until_before) - now).total_seconds() > 0.1:
        yield f"{job} was taken at {moment(turn.at)}, while another process had it"
    if turn.started_at_before is None or job not in INTERVALS:
        return
    since = (now - moment_of(turn.started_at_before)).total_seconds()
    was_ahead = since < 0 and world.in_trouble(0, turn.at, MishapKind.CLOCK)
    if not was_ahead and since < EARLY * INTERVALS[job]:
        yield f"{job} began at {moment(turn.at)}, {since:.1f} s after its last run"
