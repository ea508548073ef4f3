"""Worlds with both wires: what is sent by ActivityPub is held, looked after and released as all else is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from federation.activitypub.received import ATTEMPTS
from federation.activitypub.signatures import SignatureKind
from federation.runtime.nodes import set_aside_loaded
from tests.simulation.invariants import judge, look, slowed_down
from tests.simulation.plan import (
    HOUR,
    MINUTE,
    Death,
    Kill,
    Outage,
    Phase,
    Plan,
    PlannedArrival,
    PlannedDelivery,
    PlannedServer,
    Receiver,
    Trouble,
)
from tests.simulation.records import Past, RowChange
from tests.simulation.run import run_seed
from tests.simulation.servers import server_url
from tests.simulation.world import World, run_world

SEEDS = 200
AT_ONCE = 20
"""Of so many worlds all are taken by `scripts/test --full`, and by every run the first: ten in all."""
RUSH = 40
HEALTHY = range(1, 11)
SHOWN = 100
"""So many are held in every run, which shows the steps of a release; `scripts/test --full` holds all."""
HELD = 500


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """As a process of the node does: what is loaded is not looked through again and again."""
    set_aside_loaded()


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_both_wires_keep_every_promise(first: int, full: bool) -> None:
    """Half of the servers take activities, in their ways: one kind of signature, 401, 404, 410, pages, 202 or 409."""
    seeds = range(first, first + (AT_ONCE if full else 1))
    wrong = [verdict for seed in seeds if (verdict := run_seed(seed, rush=seed % RUSH == 0, activities=True)).findings]

    assert not wrong, "\n\n".join(map(str, wrong))


def test_after_an_hour_one_goes_ahead_and_the_rest_follows_by_twos_and_fours(full: bool) -> None:
    """Nothing is lost or comes twice, and those who are well wait no longer than without the one that was away."""
    plan = _hour(HELD if full else SHOWN)
    released: list[RowChange] = []

    def judge_all(world: World, now: float) -> Iterator[str]:
        past = Past.of(world.space.keeper, world.requests, world.wires)
        released.extend(each for each in past.by_server[server_url(0)] if each.was == "held" and each.state == "ready")
        yield from judge(world, now)

    world, alone = run_world(plan, look=look, judge=judge_all), run_world(plan.without_sick(), look=look, judge=judge)

    assert [*world.findings, *alone.findings, *slowed_down(world, alone)] == []
    back = world.servers[server_url(0)]
    assert Counter(each.activity_id for each in back.arrivals) == {
        owed.activity_id: 1 for owed in world.owed if owed.server == back.url
    }
    while_away = [each for each in released if each.at < 2 * HOUR]
    assert while_away
    assert all(count == 1 for count in Counter(each.at for each in while_away).values())
    after = Counter(each.at for each in released if each.at > 2 * HOUR)
    assert [count for _, count in sorted(after.items())][:5] == [1, 1, 2, 4, 8]


def test_what_others_send_while_the_queue_is_away_is_handled_once() -> None:
    """It has no job, then; others have their process die over them, or raise until they have failed."""
    plan = replace(
        _hour(0),
        outages=(Outage(HOUR - MINUTE, HOUR + MINUTE, of_queue=True),),
        kills=(Kill(at=HOUR + 2 * MINUTE + 0.5, process=0, pause=5.0),),
        arrivals=(
            PlannedArrival(HOUR, 1),
            *(PlannedArrival(HOUR + number, 2, raises=number) for number in (0, 2, 1)),
            PlannedArrival(HOUR + 2 * MINUTE, 3, death=Death.BEFORE, again=HOUR + 3 * MINUTE),
            PlannedArrival(HOUR + 2 * MINUTE, 4, death=Death.AFTER),
            *(PlannedArrival(HOUR + 3 * MINUTE, 5, raises=number) for number in (ATTEMPTS, 0)),
        ),
    )
    world = run_world(plan, look=look, judge=judge)

    assert world.findings == []
    assert len(world.stored) == len(plan.arrivals)
    assert sum("* crash" in line for line in world.story.lines()) == 2


def _hour(held: int) -> Plan:
    """Eleven servers that take activities: one hangs for an hour in which it is owed that many."""
    chance = random.Random(held)
    receiver = Receiver(kinds=frozenset(SignatureKind))
    phases = (Phase(HOUR, 2 * HOUR, Trouble.HANGS),)
    away = PlannedServer(number=0, latency=0.1, is_known=True, phases=phases, receiver=receiver)
    well = [PlannedServer(number=n, latency=0.05 + n / 100, is_known=True, receiver=receiver) for n in HEALTHY]
    deliveries = [
        *(PlannedDelivery(chance.uniform(0, MINUTE), (number,)) for number in (0, *HEALTHY)),
        *(PlannedDelivery(chance.uniform(HOUR, 2 * HOUR - MINUTE), (0,)) for _ in range(held)),
        *(PlannedDelivery(chance.uniform(HOUR, 2 * HOUR + 3 * MINUTE), (chance.choice(HEALTHY),)) for _ in range(120)),
    ]
    return Plan(
        seed=1,
        servers=(away, *well),
        deliveries=tuple(sorted(deliveries, key=lambda each: each.at)),
        sick=frozenset({away.number}),
        processes=1,
        end=3 * HOUR,
    )
