"""Servers that are away are looked at in time, not too often, by one delivery at a time; then all go out in order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from tests.simulation.pace import SWEPT
from tests.simulation.plan import DAY, HOUR, MINUTE, Deed
from tests.simulation.records import LinkChange, MishapKind, Past, Request, RowChange
from tests.simulation.story import moment
from tests.simulation.world import World

FIRST_LOOKS: Final = (30.0, *(MINUTE * minutes for minutes in (1, 2, 5, 15, 25, 35, 45)))
NEWS: Final = MINUTE
"""What is held for a server, and was not when it was last looked at, brings a look forward, but not more often."""
PART: Final = 24
AT_MOST: Final = 2 * MINUTE
LATE: Final = 60.0
STARTS: Final = 1 / 4
RATE: Final = 50
MOST_WAITING: Final = 10
_OURS: Final = tuple(MishapKind)


def interval(number: int, away: float) -> float:
    """How long after the `number`-th look in vain the next one is due, where something is held for the server."""
    later = HOUR * 2 ** min(number - len(FIRST_LOOKS), 10) if number >= len(FIRST_LOOKS) else 0.0
    planned = FIRST_LOOKS[number] if number < len(FIRST_LOOKS) else min(later, DAY)
    return min(planned, max(AT_MOST, away / PART))


@dataclass(slots=True)
class Outage:
    """A server was away from `start` to `end`: nothing was acknowledged meanwhile, though its link may have been up."""

    start: float
    end: float = math.inf
    state: str = "down"
    downs: list[tuple[float, float]] = field(default_factory=list)
    """When its link was down."""


def outages(links: Sequence[LinkChange]) -> Iterator[Outage]:
    """Those of one server, by its link."""
    current: Outage | None = None
    acknowledged_at: str | None = None
    was_up = True
    for link in links:
        is_up = link.state == "up"
        if was_up and not is_up:
            current = current or Outage(link.at, state=link.state)
            current.downs.append((link.at, math.inf))
        elif is_up and not was_up and current is not None:
            current.downs[-1] = (current.downs[-1][0], link.at)
        if current is not None and not is_up and link.state != "down":
            current.state = link.state
        if current is not None and is_up and link.acknowledged_at != acknowledged_at:
            current.end = link.at
            yield current
            current = None
        acknowledged_at, was_up = link.acknowledged_at, is_up
    if current is not None:
        yield current


def looks_and_releases(world: World, past: Past) -> Iterator[str]:
    """What is wrong with looks at servers that are away, and with what follows when they are back."""
    for server, links in past.links.items():
        changes, requests = past.by_server.get(server, ()), past.requests.get(server, ())
        for outage in outages(links):
            yield from _looks(world, server, outage, changes, requests, links)
        yield from _one_at_a_time(world, server, changes)
        yield from _releases(world, server, changes, links)


def _looks(
    world: World,
    server: str,
    outage: Outage,
    changes: Sequence[RowChange],
    requests: Sequence[Request],
    links: Sequence[LinkChange],
) -> Iterator[str]:
    if outage.state != "down" or world.in_trouble(outage.start, min(outage.end, world.plan.end), MishapKind.CLOCK):
        return
    canaries = [each.at for each in changes if each.begins and each.canary_before and _within(outage, each.at)]
    yield from _too_often(world, server, outage, canaries, changes, requests)
    yield from _too_rarely(world, server, outage, changes, requests, links)


def _within(outage: Outage, at: float) -> bool:
    return any(start <= at < end for start, end in outage.downs)


def _too_often(
    world: World,
    server: str,
    outage: Outage,
    canaries: Sequence[float],
    changes: Sequence[RowChange],
    requests: Sequence[Request],
) -> Iterator[str]:
    news = [each.at for each in changes if each.state == "held" and each.was != "held" and each.reason == "server"]
    heard = [at for at in news if at not in set(canaries)]
    refused = {each.at for each in requests if each.status is not None and 400 <= each.status < 500}
    before = outage.start
    for number, at in enumerate(canaries):
        least = 0.9 * interval(number, before - outage.start)
        has_news = any(before < each <= at for each in heard) and at - before > NEWS - 2
        was_refused = any(before <= each < before + 20 for each in refused)
        if at - before < least and not has_news and not was_refused and not world.in_trouble(before, at):
            yield (
                f"{server} is away since {moment(outage.start)}, and was looked at at {moment(before)} and again at"
                f" {moment(at)}: {at - before:.0f} s instead of {least / 0.9:.0f}"
            )
        before = at


def _too_rarely(
    world: World,
    server: str,
    outage: Outage,
    changes: Sequence[RowChange],
    requests: Sequence[Request],
    links: Sequence[LinkChange],
) -> Iterator[str]:
    """While something is held, looks come after each 24th part of the outage at the latest, unless the server rests."""
    for start, down_until in outage.downs:
        end = min(down_until, world.plan.end)
        looks = [each.at for each in requests if start < each.at < end]
        held_since = min(
            (each.at for each in changes if start <= each.at < end and each.reason == "server"), default=end
        )
        held_until = max((each.at for each in changes if each.at <= end and each.was == "held"), default=start)
        rests = any(link.rest_until is not None for link in links if start - DAY < link.at < end)
        banned = any(ban.server == server and ban.start < end and start < ban.end + DAY for ban in world.bans)
        if rests or banned:
            continue
        for before, after in pairwise((start, *looks, end)):
            since = max(before, held_since)
            longest = max(AT_MOST, (after - outage.start) / PART) * 1.1 + LATE
            if after - since > longest and held_until > since and not world.in_trouble(since - MINUTE, after, *_OURS):
                yield (
                    f"{server} is away since {moment(outage.start)}, something is held for it, and nobody looked at it"
                    f" from {moment(since)} to {moment(after)}"
                )


def _stays_up(links: Sequence[LinkChange], start: float, end: float) -> bool:
    """Whether deliveries could be sent all the time."""
    seen = [link for link in links if start <= link.at < end]
    return all(link.state == "up" and not link.operator_hold and link.rest_until is None for link in seen)


def _one_at_a_time(world: World, server: str, changes: Sequence[RowChange]) -> Iterator[str]:
    """One canary is under way at a time."""
    under_way: dict[str, float] = {}
    for change in changes:
        if change.begins and change.canary_before:
            others = [each for each in under_way if each != change.id]
            if others and not world.in_trouble(under_way[others[0]] - MINUTE, change.at):
                yield f"{change.id} is sent ahead to {server} at {moment(change.at)}, and {others[0]} still is"
            under_way[change.id] = change.at
        elif change.sending is None or change.state != "ready":
            under_way.pop(change.id, None)


def _releases(world: World, server: str, changes: Sequence[RowChange], links: Sequence[LinkChange]) -> Iterator[str]:
    """What was held goes out oldest first, at 1, 2, 4 ... a second."""
    # Those held for other reasons go out at once when an operator lets go of a server.
    let_go = [ban.end for ban in world.bans if ban.server == server and ban.deed is Deed.HOLDS]
    held: dict[str, RowChange] = {}
    batches: defaultdict[float, list[RowChange]] = defaultdict(list)
    left: dict[float, list[RowChange]] = {}
    for change in changes:
        was_held = held.pop(change.id, None)
        if change.state == "held" and change.reason in ("server", "rest", "busy"):
            held[change.id] = change
        if was_held is not None and change.is_release and not any(abs(change.at - at) < 0.01 for at in let_go):
            batches[change.at].append(change)
        if change.at in batches:
            left[change.at] = list(held.values())
    start, total = -math.inf, 0
    times = sorted(batches)
    for before, at in zip((-math.inf, *times), times, strict=False):
        batch = batches[at]
        older = [each for each in left[at] if each.at < at and each.created_at < max(row.created_at for row in batch)]
        if older:
            yield f"{batch[-1].id} was released to {server} at {moment(at)} before {older[0].id}, which is older"
        if at - before > MINUTE or any(before < link.at <= at and link.was != "up" for link in links):
            start, total = at, 0
        total += len(batch)
        # Of what an operator lets go the first batch is not told from what goes out at once.
        most = 2 ** (at - start + (2.6 if any(start - 5 < each <= start for each in let_go) else 1.6))
        if total > most or len(batch) > RATE:
            yield f"{total} were released to {server} by {moment(at)}, within {at - start:.1f} s"
        after = next((each for each in times if each > at), math.inf)
        withdrawn = {change.id for change in changes if change.state == "gone" and at < change.at < after}
        waits = [each for each in left[at] if each.at < at and each.id not in withdrawn]
        if (
            waits
            and _stays_up(links, at, after)
            and after - at > 1 / STARTS + 1
            and not world.in_trouble(at - MINUTE, at + SWEPT)
        ):
            yield f"after {moment(at)} the release to {server} went on at {after}, and {len(waits)} waited"
