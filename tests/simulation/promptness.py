"""What is well is quick: nobody waits for a delivery to a server that takes it, or for a recurring job that is due."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from tests.simulation.plan import HOUR, MINUTE, QUIET
from tests.simulation.records import MishapKind, Past, Turn, moment_of
from tests.simulation.story import moment
from tests.simulation.world import Owed, World

SOON: Final = MINUTE
AMONG_PAGES: Final = 5 * MINUTE
"""Where a server fails at one delivery in three intervals of ten seconds, and takes none meanwhile, its link falls."""
DENSE: Final = 80.0
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
    soon = SOON if _is_alone(world, owed) else AMONG_PAGES
    if not is_well or was_banned or was_meddled or applied - owed.at <= soon:
        return
    others = [kind for kind in MishapKind if kind is not MishapKind.LOSS]
    if world.in_trouble(owed.at - 15 * MINUTE, owed.at + REGAINED, *others):
        return
    if any(owed.at - MINUTE < lost < owed.at + SOON and applied < lost + REGAINED for lost in world.plan.losses):
        return
    yield f"{owed.delivery_id} to {owed.server}, owed since {moment(owed.at)}, took {applied - owed.at:.0f} s"


def _is_alone(world: World, owed: Owed) -> bool:
    """Whether its server answers no other delivery with a page, or takes others so often that this is no outage."""
    pages = [each.at for each in world.owed if each.page is not None and each.server == owed.server]
    return all(owed.at < page or owed.at - page < DENSE for page in pages)


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
