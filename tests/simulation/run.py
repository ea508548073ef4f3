"""Seeds, one after the other or several at once, and what they found."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import process_time

from tests.simulation.invariants import judge, look, slowed_down
from tests.simulation.plan import HOUR
from tests.simulation.planner import make_plan
from tests.simulation.receivers import with_activities
from tests.simulation.surprises import with_surprises
from tests.simulation.world import World, run_world

LONGEST_STORY = 200
"""Lines."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a seed came to, in so many simulated hours. `digest` tells runs apart.

    `story` is there if something was wrong, or it was asked for.
    """

    seed: int
    servers: int
    owed: int
    hours: float
    digest: str
    cpu_seconds: float
    findings: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = "\n".join(self.story[-LONGEST_STORY:])
        found = "\n".join(f"  {finding}" for finding in self.findings)
        return f"seed {self.seed} of {self.servers} servers:\n{found}\n\nWhat happened:\n{told}"


def run_seed(
    seed: int,
    servers: int = 20,
    *,
    rush: bool = True,
    tell: bool = False,
    on_engines: bool = False,
    plain: bool = False,
    activities: bool = False,
) -> Verdict:
    """The world of a seed, judged; with `rush` also a while in which all are written to and the sick ones hang, against
    the same while without them. `tell` its story, too, if nothing is wrong. `on_engines` all statements go through
    SQLAlchemy's engines. `plain`: posts are sent by another wire. `activities`: half of the servers take
    activities.
    """
    started = process_time()
    plan = with_surprises(make_plan(seed, servers))
    if plain:
        plan = plan.plain()
    if activities:
        plan = with_activities(plan)
    world = run_world(plan, look=look, judge=judge, on_engines=on_engines)
    findings = list(dict.fromkeys(world.findings))
    seconds = plan.end
    if rush:
        busy = plan.rush()
        crowded, alone = (run_world(each, look=look, judge=judge) for each in (busy, busy.without_sick()))
        seconds += 2 * busy.end
        findings += [*dict.fromkeys(crowded.findings), *slowed_down(crowded, alone)]
    return Verdict(
        seed=seed,
        servers=servers,
        owed=len(world.owed),
        hours=seconds / HOUR,
        digest=world.story.digest(),
        cpu_seconds=process_time() - started,
        findings=findings,
        story=list(world.story.lines(about=_named_in(world, findings))) if findings or tell else [],
    )


def _named_in(world: World, findings: list[str]) -> set[str] | None:
    """The deliveries and servers of which the findings tell; None: they tell of the world as a whole."""
    told = " ".join(findings)
    named = {name for owed in world.owed for name in (owed.delivery_id, owed.server, owed.activity_id) if name in told}
    return named or None
