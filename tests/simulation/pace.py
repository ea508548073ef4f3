"""Nothing is sent too early: not during a rest, before its time, before its turn, or to a server that is away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from federation.protocol.relaying import RELAY_PATH
from tests.simulation.plan import DAY, HOUR, MINUTE, Deed
from tests.simulation.records import LinkChange, MishapKind, Past, Request, RowChange, moment_of
from tests.simulation.story import moment
from tests.simulation.world import World

LEARNS_OF_IT: Final = 6.0
"""Seconds in which each process hears of what another one wrote of a server: links are remembered for five."""
SWEPT: Final = 95.0
"""Seconds within which a sweep moves on what is due: three times the pause between two sweeps."""
ALONE: Final = (10 * MINUTE, HOUR, 6 * HOUR)
IN_DOUBT: Final = (15 * MINUTE, 2 * HOUR, 12 * HOUR)
SPARED: Final = 22 * HOUR
LONGEST_BUSY: Final = 13 * MINUTE
SHORTEST_REST, DEFAULT_REST, LONGEST_REST = 1.0, MINUTE, DAY
_ASLEEP: Final = (MishapKind.PROCESS, MishapKind.FROZEN, MishapKind.DATABASE, MishapKind.QUEUE, MishapKind.CLOCK)


def too_early(world: World, past: Past) -> Iterator[str]:
    """What was sent, or made ready, before it was to be."""
    for server, requests in past.requests.items():
        yield from _during_bans(world, server, requests)
        yield from _during_rests(world, server, requests)
    for server, changes in past.by_server.items():
        yield from _left_by_bans(world, server, changes)
    for delivery, changes in past.rows.items():
        yield from _expiry(world, delivery, changes)
        yield from _holds(world, delivery, changes)
        yield from _beginnings(world, delivery, changes, past.links.get(changes[0].server, ()))


def _during_bans(world: World, server: str, requests: Sequence[Request]) -> Iterator[str]:
    for ban in (each for each in world.bans if each.server == server):
        for request in requests:
            begun_late = ban.start + LEARNS_OF_IT < request.at < ban.end
            is_ours = request.job is not None and request.path != RELAY_PATH
            if begun_late and is_ours and not _just_thawed(world, request.at):
                yield f"{request.job} was sent to {server} at {moment(request.at)}: an operator {ban.deed}"


def _left_by_bans(world: World, server: str, changes: Sequence[RowChange]) -> Iterator[str]:
    """What is held for a blacklisted server is given up by the next sweep."""
    for ban in (each for each in world.bans if each.server == server and each.deed is Deed.BLACKLISTS):
        end = ban.start + SWEPT + LEARNS_OF_IT
        if end > ban.end or world.in_trouble(ban.start - MINUTE, end):
            continue
        last = {change.id: change for change in changes if change.at < end}
        left = [change for change in last.values() if change.state == "held" and change.at < ban.start]
        yield from (f"{change.id} is held for {server} at {moment(end)}: an operator {ban.deed}" for change in left)


def _expiry(world: World, delivery: str, changes: Sequence[RowChange]) -> Iterator[str]:
    """Nothing is given up for its age within a day after the clock seems to have been set ahead."""
    for change in changes:
        jumps = [each for each in world.plan.jumps if each.process is None and each.by > HOUR + MINUTE]
        if change.state == "expired" and any(each.at <= change.at < each.at + SPARED for each in jumps):
            yield f"{delivery} expired at {moment(change.at)}, just after the clock was set"


def _during_rests(world: World, server: str, requests: Sequence[Request]) -> Iterator[str]:
    """A server that asked for a pause gets it. Whoever had begun before goes on, and so does what it relays."""
    sent = [each for each in requests if each.path != RELAY_PATH and each.job is not None]
    for answered in sent:
        pause = _pause(answered)
        if pause is None or answered.answered_at is None or world.in_trouble(answered.at, answered.answered_at + 1):
            continue
        start, end = answered.answered_at + LEARNS_OF_IT, answered.answered_at + pause - 1
        for request in sent:
            if start < request.at < end and not _may_go_on(world, server, answered.answered_at, request.at):
                asked = f"asked for {pause:.0f} s at {moment(answered.answered_at)}"
                yield f"{request.job} was sent to {server} at {moment(request.at)}, which {asked}"


def _pause(request: Request) -> float | None:
    """How long the server asked to be left alone by this answer; None if it did not ask."""
    if request.status == 429 and request.rest is None:
        return DEFAULT_REST
    if request.status not in (429, 503) or request.rest is None:
        return None
    return min(max(float(request.rest), SHORTEST_REST), LONGEST_REST)


def _may_go_on(world: World, server: str, start: float, end: float) -> bool:
    """Whether a clock was set meanwhile, an operator let everything go, or a process woke up from before."""
    let_go = any(
        ban.deed is Deed.HOLDS and ban.server == server and start < ban.end + MINUTE and ban.end < end + 1
        for ban in world.bans
    )
    return let_go or world.in_trouble(start, end, MishapKind.CLOCK) or _just_thawed(world, end)


def _just_thawed(world: World, at: float) -> bool:
    """Whether a process may act by what it knew before it stood still."""
    return world.in_trouble(at - 1, at, MishapKind.FROZEN)


def _holds(world: World, delivery: str, changes: Sequence[RowChange]) -> Iterator[str]:
    """What is held until a time is released then: not before, and soon after."""
    alone = ours = 0
    for before, held, after in zip((None, *changes), changes, (*changes[1:], None), strict=False):
        if held.was == "held" or held.state != "held" or held.reason not in ("busy", "ours", "alone"):
            is_other_fault = held.state == "held" and before is not None and before.sending is not None
            ours = 0 if is_other_fault else ours
            continue
        named = f"{delivery} was held at {moment(held.at)} ({held.reason})"
        if held.until is None:
            yield f"{named} without an end"
            continue
        pause = (moment_of(held.until) - world.space.clock.shown(held.at)).total_seconds()
        is_later = held.reason == "alone" or is_doubt(held)
        alone, ours = alone + is_later, ours + (held.reason == "ours")
        expected = _expected(held, alone, ours)
        is_right_clock = not world.in_trouble(held.at - 1, held.at + 1, MishapKind.CLOCK)
        if expected is not None and abs(pause - expected) > 2 and is_right_clock:
            yield f"{named} for {pause:.0f} s instead of {expected:.0f}"
        if held.reason == "busy" and pause > LONGEST_BUSY and is_right_clock:
            yield f"{named} for {pause:.0f} s"
        yield from _end_of(world, named, held, after, pause)


def is_doubt(held: RowChange) -> bool:
    """Whether it was refused by a server that may not have been able to fetch our key."""
    return (held.state, held.reason, held.code) == ("held", "ours", "HTTP_401")


def _expected(held: RowChange, alone: int, ours: int) -> float | None:
    if is_doubt(held):
        return float(IN_DOUBT[min(alone, len(IN_DOUBT)) - 1])
    if held.reason == "alone":
        return float(ALONE[min(alone, len(ALONE)) - 1])
    if held.reason == "ours" and held.suspect is None:
        return float(min(MINUTE * 2 ** (ours - 1), HOUR))
    return None


def _end_of(world: World, named: str, held: RowChange, after: RowChange | None, pause: float) -> Iterator[str]:
    due = held.at + pause
    end = world.plan.end if after is None else after.at
    if world.in_trouble(held.at, end, MishapKind.CLOCK) or held.suspect is not None:
        return  # suspects go out when those before them are through
    is_early = after is not None and after.state == "ready" and after.at < due - 1
    by_release = after is not None and after.released_at is not None
    if is_early and not by_release and not _may_go_on(world, held.server, held.at, end):
        yield f"{named} for {pause:.0f} s, and was released at {moment(end)}"
    if end > due + SWEPT and not world.in_trouble(due - MINUTE, due + SWEPT, *_ASLEEP):
        yield f"{named} for {pause:.0f} s, and was not released until {moment(end)}"


def _beginnings(
    world: World, delivery: str, changes: Sequence[RowChange], links: Sequence[LinkChange]
) -> Iterator[str]:
    """An attempt begins in its turn, and only canaries begin while the server is away."""
    for change in changes:
        if not change.begins:
            continue
        named = f"an attempt at {delivery} to {change.server} began at {moment(change.at)}"
        if not change.in_turn:
            yield f"{named} before that of an older one of its key"
        if change.was != "ready":
            yield f"{named}, when it was {change.was}"
        is_open = change.link in (None, "up") or change.canary_before
        if not is_open and not _fell_just_now(links, change.at) and not _just_thawed(world, change.at):
            yield f"{named}, when its link was {change.link}"


def _fell_just_now(links: Sequence[LinkChange], at: float) -> bool:
    return any(at - LEARNS_OF_IT < link.at <= at and (link.state != "up" or link.operator_hold) for link in links)
