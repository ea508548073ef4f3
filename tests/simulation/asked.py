"""What `federation why` says at random moments, against what is so: the rows, the queue, and what happens next."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from db import LinkState
from federation.admin.why import Explanation
from federation.admin.words import counted
from tests.simulation.plan import HOUR, MINUTE, WEEK, Plan
from tests.simulation.records import MishapKind, Past, moment_of
from tests.simulation.servers import server_url
from tests.simulation.story import moment

if TYPE_CHECKING:
    from tests.simulation.world import World

QUESTIONS: Final = 6
REGAINED: Final = 4 * MINUTE
"""Within this time what is on its way has a job again, whatever became of that."""
LATE: Final = MINUTE
_LINK: Final = """
SELECT coalesce(max(iif(wire = ?, state, NULL)), 'up'), coalesce(max(operator_hold), 0)
FROM server_links WHERE server_url = ?
"""
"""An operator's hold is of the server: it may be on a link by another wire, while this one has none."""
UNDER_WAY: Final = 30.0
"""Who asks during a look hears when it would be made again if nothing came of it."""


@dataclass(frozen=True, slots=True)
class Promise:
    """At `asked` somebody was told that the server is looked at at `due`, by the times of the loop."""

    server: str
    asked: float
    due: float


def questions(plan: Plan) -> list[tuple[float, str]]:
    """When somebody asks, and about which server: mostly while one is in trouble."""
    chance = random.Random(f"{plan.seed} questions")
    troubles = [(each.number, phase) for each in plan.servers for phase in each.phases if phase.start < WEEK]
    found = [(chance.uniform(0, WEEK), server_url(chance.choice(plan.servers).number)) for _ in range(QUESTIONS // 3)]
    for _ in range(QUESTIONS - len(found) if troubles else 0):
        number, phase = chance.choice(troubles)
        found.append((chance.uniform(phase.start, min(phase.end + HOUR, WEEK)), server_url(number)))
    return sorted(found)


def untrue(world: World, now: float, told: Explanation) -> Iterator[str]:
    """What is not so now of what is told now."""
    asked = f"asked at {moment(now)} about {told.url}, `why` says"
    said = " ".join(told.sentences())
    yield from (f"{asked} {wrong!r}, which is not so: {said}" for wrong in _wrong(world, now, told, said))


def _wrong(world: World, now: float, told: Explanation, said: str) -> Iterator[str]:
    rows = world.space.rows("SELECT state, job_id, created_at FROM delivery_jobs WHERE server_url = ?", told.url)
    held = sum(state == "held" for state, *_ in rows)
    if not told.rules:
        if held and f"{counted(held)} {'is' if held == 1 else 'are'} held for it" not in said:
            yield f"how many are held ({held} are)"
        if not held and "held for it," in said:
            yield "that something is held"
        [(state, by_hand)] = world.space.rows(_LINK, world.wires[told.url], told.url)
        if ("held by an operator" in said) != bool(by_hand) or ("it is down" in said.lower()) != (
            state == "down" and not by_hand
        ):
            yield f"how its link is ({state})"
    ready = [(job, created) for row, job, created in rows if row == "ready"]
    if told.lacks_workers and not world.in_trouble(now - REGAINED, now):
        yield "that no process delivers"
    how = "to be sent" if told.lacks_workers else "on the way"
    if ready and f"{counted(len(ready))} to it {'is' if len(ready) == 1 else 'are'} {how}" not in said:
        yield f"how many are {how} ({len(ready)} are)"
    if "is on the way" in said or "are on the way" in said:
        yield from _stranded(world, now, [job for job, created in ready if _age(world, created, now) > REGAINED])


def _stranded(world: World, now: float, jobs: Sequence[str]) -> Iterator[str]:
    lost = [job for job in jobs if not world.queues.has_open(job)]
    if lost and not world.in_trouble(now - REGAINED, now):
        yield f"that {', '.join(lost)} is on the way"


def _age(world: World, created: str, now: float) -> float:
    return (world.space.clock.shown(now) - moment_of(created)).total_seconds()


def promise_of(world: World, now: float, told: Explanation) -> Promise | None:
    """When the next look is, if one is told of."""
    at: datetime | None = told.link.next_probe_at
    if told.rules or told.link.operator_hold or told.link.state is not LinkState.DOWN or at is None:
        return None
    return Promise(told.url, now, now + max((at - world.space.clock.shown(now)).total_seconds(), 0.0))


def promises_kept(world: World, past: Past) -> Iterator[str]:
    """Each server was looked at by the time that was told, or its link was up before."""
    for promise in world.promises:
        end = promise.due + LATE
        looked_at = [each.at for each in past.requests.get(promise.server, ())]
        is_looked_at = any(promise.asked - UNDER_WAY <= at <= end for at in looked_at)
        is_changed = any(
            promise.asked <= each.at <= end for each in past.links.get(promise.server, ()) if each.state == "up"
        )
        is_banned = any(ban.server == promise.server and ban.start < end for ban in world.bans)
        is_over = end > world.plan.end or world.in_trouble(promise.asked, end, *MishapKind)
        if not (is_looked_at or is_changed or is_banned or is_over):
            yield (
                f"asked at {moment(promise.asked)}, `why` says that {promise.server} is looked at at"
                f" {moment(promise.due)}, and nobody looked"
            )
