"""What has to be true of a world, whatever happened in it. Findings name the delivery, its server and the times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Final

from federation.delivery.error_codes import STALLED
from federation.delivery.rows import series_job_id
from federation.retention import KEEP_SETTLED_ROWS
from tests.simulation.arrivals import handled_late, handled_once
from tests.simulation.asked import promises_kept
from tests.simulation.attempts import attempts_agree
from tests.simulation.incidents import Wish
from tests.simulation.knocks import knocks
from tests.simulation.looks import looks_and_releases
from tests.simulation.owing import Owed
from tests.simulation.pace import SPARED, too_early
from tests.simulation.plan import (
    DAY,
    FORBIDS_ONE,
    GONE,
    HOUR,
    MINUTE,
    NOT_FOUND,
    QUIET,
    REFUSES_ONE,
    TAKES_DELIVERIES,
    Deed,
    Meddling,
    Phase,
    Trouble,
)
from tests.simulation.promptness import LOOKS, RESTING, promptness
from tests.simulation.records import Past
from tests.simulation.refusals import refusals, was_refused
from tests.simulation.servers import SimulatedServer, server_url
from tests.simulation.story import moment
from tests.simulation.world import World

MAX_AGE: Final = timedelta(days=7).total_seconds()
LEARNS_OF_IT: Final = 5 * MINUTE
TRIED_FOR: Final = 8 * HOUR
"""Four series of attempts at a delivery that fails alone take this long, with the pauses between them."""
FEW: Final = 20
"""Fewer deliveries than this were not made to lie around the tries of another."""
SLOWER: Final = 1.2
"""So many times as long as without the sick ones may deliveries to healthy servers take, for 95 % of them."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is left of a delivery."""

    state: str
    reason: str | None
    code: str | None
    error: str | None
    job_id: str
    series: int

    def __str__(self) -> str:
        return f"{self.state} {self.reason or ''} {self.code or ''} {self.error or ''}".strip()


def look(world: World, now: float) -> Iterator[str]:
    """What is wrong while the world goes on; asked when nobody has been at work for a while."""
    yield from held_with_jobs(world, now)
    yield from left_waiting(world, now)
    yield from handled_late(world, now)


def judge(world: World, now: float) -> Iterator[str]:
    """What is wrong at the end."""
    rows = rows_of(world)
    for owed in world.owed:
        if owed.page is None and not owed.is_poison and was_refused(world, owed):
            continue
        of = _of_poison if owed.is_poison else _of_delivery if owed.page is None else _of_disliked
        yield from of(world, owed, rows.get(owed.delivery_id))
    yield from overtaken(world)
    yield from repeated(world)
    yield from follows(world)
    yield from blacklisted(world)
    yield from held_with_jobs(world, now)
    past = Past.of(world.space.keeper, world.requests, world.wires)
    yield from attempts_agree(world, past)
    yield from knocks(world, past)
    yield from refusals(world, past)
    yield from too_early(world, past)
    yield from looks_and_releases(world, past)
    yield from promptness(world, past)
    yield from promises_kept(world, past)
    yield from handled_once(world)


def rows_of(world: World) -> dict[str, Row]:
    """Every row that is left, by its delivery."""
    found = world.space.rows("SELECT id, state, held_reason, error_code, last_error, job_id, series FROM delivery_jobs")
    return {row[0]: Row(*row[1:]) for row in found}


def _of_delivery(world: World, owed: Owed, row: Row | None) -> Iterator[str]:
    server = world.servers[owed.server]
    if _was_blacklisted(world, server, owed.at) and (row is None or row.state == "failed"):
        return
    if row is not None and row.state == "expired" and _may_have_expired(world, server, owed.at):
        return
    if owed.activity_id in server.first_applied:
        if row is not None and not _is_away(world, server):
            yield f"{_named(owed)} was applied at {moment(server.first_applied[owed.activity_id])} and is still: {row}"
        return
    if not _is_away(world, server):
        yield f"{_named(owed)} was never applied, though its server is well since {moment(_well_since(server))}: {row}"
    elif row is None:
        yield f"{_named(owed)} is gone, and its server never had it"
    elif row.state != "held" and not (row.state == "expired" and _age(world, owed) > MAX_AGE):
        yield f"{_named(owed)} is not held for its server, which is away: {row}"


def _of_poison(world: World, owed: Owed, row: Row | None) -> Iterator[str]:
    server = world.servers[owed.server]
    if _is_away(world, server) or _was_blacklisted(world, server, owed.at):
        return
    if row is None and _age(world, owed) > KEEP_SETTLED_ROWS.total_seconds():
        return  # it may have been found out long ago, and purged
    if row is None or row.state != "failed" or row.code != STALLED:
        yield f"{_named(owed)} crashes workers, and was not found out: {row}"


def _of_disliked(world: World, owed: Owed, row: Row | None) -> Iterator[str]:
    """A delivery that its server answers with a page: it fails by itself, if the server took others around its tries.

    Otherwise it is as if the server were away: it never took anything.
    """
    if any(each.start < owed.at + TRIED_FOR and owed.at < each.end for each in world.plan.outages):
        return  # it was tried later, when nobody lay around its tries
    taken = [at for at in world.servers[owed.server].first_applied.values() if at > owed.at]
    is_lost = owed.page in (NOT_FOUND, GONE) and owed.inbox is not None
    needed = -1 if is_lost else 1 if owed.page in (REFUSES_ONE, FORBIDS_ONE) else FEW
    if row is None:  # purged, or forgotten when the next of its key arrived
        is_over = _age(world, owed) > KEEP_SETTLED_ROWS.total_seconds() or owed.ordering_key is not None
    else:
        codes = (f"HTTP_{owed.page}", *(["INBOX_GONE"] if is_lost else []))
        is_over = row.state == "failed" and row.code in codes
    if not is_over and len(taken) > needed and not _was_blacklisted(world, world.servers[owed.server], owed.at):
        yield f"{_named(owed)} is answered by {owed.page} each time, as no other is, and was not given up: {row}"


def overtaken(world: World) -> Iterator[str]:
    """Deliveries of one key to one server that were applied in another order than they were owed in."""
    lines: dict[tuple[str, str], list[Owed]] = defaultdict(list)
    for owed in world.owed:
        if owed.ordering_key is not None:
            lines[owed.server, owed.ordering_key].append(owed)
    for (server, _), line in lines.items():
        applied = world.servers[server].first_applied
        arrived = [(applied[owed.activity_id], owed) for owed in line if owed.activity_id in applied]
        for (before, older), (after, younger) in pairwise(arrived):
            if after < before:
                yield (f"{_named(younger)} overtook {_named(older)}: applied at {moment(after)} and {moment(before)}")


def repeated(world: World) -> Iterator[str]:
    """Deliveries that were sent again after their server's answer had got through, and nothing of ours had failed."""
    for server in world.servers.values():
        answered: dict[str, float] = {}
        for arrival in server.arrivals:
            since = answered.get(arrival.activity_id)
            if since is not None and not world.in_trouble(since - MINUTE, arrival.at):
                yield (
                    f"{arrival.activity_id} to {server.url} was acknowledged at {moment(since)}"
                    f" and sent again at {moment(arrival.at)}"
                )
            if arrival.answered:
                answered.setdefault(arrival.activity_id, arrival.at)


def left_waiting(world: World, now: float) -> Iterator[str]:
    """Deliveries to servers that have been well for so long that each wait there is must be over."""
    if world.in_trouble(now - QUIET, now):
        return
    well = {
        url
        for url, server in world.servers.items()
        if _is_well_since(server, now - QUIET, now) and not _is_nameless_stranger(world, server, now)
    }
    for owed in world.owed:
        server = world.servers[owed.server]
        is_late = owed.at < now - QUIET and owed.activity_id not in server.first_applied
        is_usual = not owed.is_poison and owed.page is None
        is_over = _was_blacklisted(world, server, owed.at) or _may_have_expired(world, server, owed.at)
        if is_late and owed.server in well and is_usual and not is_over and not was_refused(world, owed):
            yield f"{_named(owed)} still waits at {moment(now)}"


def follows(world: World) -> Iterator[str]:
    """What users wanted and servers were told, pair by pair: never an older wish after a younger, and the last one."""
    for pair, wishes in world.wanted.items():
        server = world.servers[pair.server]
        places = {(wish.method, wish.follow_id): place for place, wish in enumerate(wishes)}
        told = [(places[key], each.at) for each in server.follows if (key := (each.method, each.follow_id)) in places]
        for (older, _), (younger, at) in pairwise(told):
            if younger < older:
                yield f"{pair} heard of wish {younger} at {moment(at)}, after wish {older}"
        # A follow that nobody heard of and its end are as good as neither.
        owed = [place for place, wish in enumerate(wishes) if wish.is_owed and not _is_cancelled(wishes, place)]
        last = told[-1][0] if told else None
        if (
            owed
            and last != owed[-1]
            and not _is_away(world, server)
            and not _was_blacklisted(world, server, wishes[0].at)
            and not _may_have_expired(world, server, wishes[owed[-1]].at)
        ):
            yield f"{pair} heard last of wish {last}, not of {owed[-1]} from {moment(wishes[owed[-1]].at)}"


def _is_cancelled(wishes: list[Wish], place: int) -> bool:
    """Whether the next wish took this one back before it was ever tried."""
    return place + 1 < len(wishes) and not wishes[place + 1].is_owed


def blacklisted(world: World) -> Iterator[str]:
    """Servers that were sent something while they were blacklisted, after the minutes in which everybody learns of it.

    What was under way then may arrive: an attempt has a minute, and a relay another.
    """
    for ban in world.bans:
        server = world.servers[ban.server]
        for arrival in server.arrivals:
            if ban.start + LEARNS_OF_IT < arrival.at < ban.end:
                went = f"{arrival.activity_id} went to {server.url} at {moment(arrival.at)}"
                yield f"{went}, though since {moment(ban.start)} an operator {ban.deed}"


def _blacklistings(world: World) -> Iterator[Meddling]:
    return (each for each in world.plan.meddlings if each.deed is Deed.BLACKLISTS)


def _was_blacklisted(world: World, server: SimulatedServer, since: float) -> bool:
    """Whether what was owed then may have been given up for it; the end takes a while to be heard of, too."""
    return any(
        server_url(each.server) == server.url and since < each.end + LEARNS_OF_IT and each.at < world.plan.end
        for each in _blacklistings(world)
    )


def _age(world: World, owed: Owed) -> float:
    """How old the delivery is for the node at the end."""
    return world.plan.end - owed.at + world.plan.set_forward(owed.at)


def _may_have_expired(world: World, server: SimulatedServer, since: float) -> bool:
    """Whether what was owed then was too old for the node while the server was away: its clock was set ahead, and what
    is held is spared for a while only. A server that asked for a rest may do so for a day after it is back.
    """
    spared = [jump.at + SPARED for jump in world.plan.jumps if jump.by > 0 and jump.process is None and jump.at > since]
    return any(
        phase.start < at < phase.end + (DAY if phase.trouble in RESTING else MAX_AGE / LOOKS)
        and at - since + world.plan.set_forward(since) > MAX_AGE
        for phase in server.planned.phases
        for at in spared
    )


def held_with_jobs(world: World, now: float) -> Iterator[str]:
    """Held deliveries that have a job waiting all the same, which takes room in the queue and a claim."""
    if world.queues.has_claims() or world.in_trouble(now - 5 * MINUTE, now):
        return
    waiting = world.queues.waiting()
    for delivery_id, row in rows_of(world).items() if waiting else ():
        jobs = {series_job_id(delivery_id, series) for series in range(row.series + 1)} & waiting
        if row.state == "held" and jobs:
            yield f"{delivery_id} is {row} at {moment(now)} and has the jobs {sorted(jobs)}"


def slowed_down(world: World, without_sick: World) -> Iterator[str]:
    """Healthy servers that wait for sick ones."""
    usual, found = (_p95(_latencies(each)) for each in (without_sick, world))
    if found > SLOWER * usual:
        yield f"deliveries to healthy servers take {found:.3f} s, and {usual:.3f} s without sick servers (p95)"


def _latencies(world: World) -> Iterator[float]:
    for owed in world.owed:
        server = world.servers[owed.server]
        applied = server.first_applied.get(owed.activity_id, math.inf)
        if not server.planned.is_sick and not world.in_trouble(owed.at - MINUTE, min(applied, owed.at + MINUTE)):
            yield applied - owed.at


def _p95(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.95 * (len(ordered) - 1))] if ordered else 0.0


def _is_away(world: World, server: SimulatedServer) -> bool:
    """Whether the server takes nothing, or took nothing until just now."""
    return _well_since(server) == math.inf or _is_nameless_stranger(world, server, math.inf)


def _is_nameless_stranger(world: World, server: SimulatedServer, now: float) -> bool:
    """Whether an operator made us forget it while it had no name here: nobody can be asked for its keys."""
    nameless = any(
        phase.trouble is Trouble.CENSORED and phase.start < now and now - QUIET < phase.end
        for phase in server.planned.phases
    )
    return nameless and not world.space.rows("SELECT 1 FROM server_registry WHERE url = ?", server.url)


def _well_since(server: SimulatedServer) -> float:
    return max((phase.end for phase in server.planned.phases if _keeps_away(phase, server)), default=0.0)


def _is_well_since(server: SimulatedServer, since: float, now: float) -> bool:
    return not any(
        phase.start < now and since < phase.end for phase in server.planned.phases if _keeps_away(phase, server)
    )


def _keeps_away(phase: Phase, server: SimulatedServer) -> bool:
    """Whether nothing gets to the server meanwhile: without a name here it gets what relays take, once it is known."""
    takes = phase.trouble in TAKES_DELIVERIES and (phase.trouble is not Trouble.CENSORED or server.planned.is_known)
    return not takes


def _named(owed: Owed) -> str:
    key = f" ({owed.ordering_key})" if owed.ordering_key else ""
    return f"{owed.delivery_id}{key} to {owed.server}, owed since {moment(owed.at)},"
