"""Weeks of outages, and what a simulation has to be to prove anything: repeatable, and able to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from federation.runtime.nodes import set_aside_loaded
from tests.simulation.invariants import judge, look
from tests.simulation.plan import HOUR, MINUTE, ClockJump, Kill, Outage
from tests.simulation.planner import make_plan
from tests.simulation.run import run_seed
from tests.simulation.world import run_world

SEEDS = 200
AT_ONCE = 10
"""Of so many worlds all are taken by `scripts/test --full`, and by every run the first: twenty in all."""
PLAIN = range(4)
"""Of these tens worlds are run by another wire as well."""
RUSH = 40
"""Each so-manieth world has a rush, too, in which its sick servers hang; in `scripts/simulate` each has."""


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """As a process of the node does: what is loaded is not looked through again and again."""
    set_aside_loaded()


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_what_is_owed_is_delivered_whatever_happens(first: int, full: bool) -> None:
    """Each world ends with its deliveries applied once and in order, or held for a server that is still away."""
    seeds = range(first, first + (AT_ONCE if full else 1))
    wrong = [verdict for seed in seeds if (verdict := run_seed(seed, rush=seed % RUSH == 0)).findings]

    assert not wrong, "\n\n".join(map(str, wrong))


@pytest.mark.parametrize("first", range(0, AT_ONCE * len(PLAIN), AT_ONCE))
def test_another_wire_keeps_every_promise(first: int, full: bool) -> None:
    """Outbox, order, outages, holding, canaries, release and expiry are the engine's, and `why` tells the truth."""
    seeds = range(first, first + (AT_ONCE if full else 1))
    wrong = [verdict for seed in seeds if (verdict := run_seed(seed, rush=False, plain=True)).findings]

    assert not wrong, "\n\n".join(map(str, wrong))


def test_a_process_with_a_wrong_clock_that_starts_while_the_queue_is_away_waits_for_the_databases() -> None:
    """It claims nothing yet, which would have it ask for the time, and takes no turn at sweeps by its own."""
    plan = make_plan(1, 5)
    away = plan.deliveries[0].at - MINUTE / 2
    plan = replace(
        plan,
        deliveries=plan.deliveries[:1],
        own_machines=True,
        jumps=(ClockJump(0, -HOUR / 2, process=1),),
        outages=(Outage(away, away + 5 * MINUTE, of_queue=True),),
        kills=(Kill(away + MINUTE, process=1, pause=20),),
        end=away + HOUR,
    )
    assert run_world(plan, look=look, judge=judge).findings == []


def test_a_seed_tells_the_same_story_again() -> None:
    """Nothing but the seed decides, so that a failure can be looked at as often as needed."""
    assert run_seed(1, rush=False).digest == run_seed(1, rush=False).digest


@pytest.mark.full
def test_the_short_way_of_a_statement_is_the_same_story_as_the_long_one() -> None:
    """What `statements` leaves out changes nothing that happens."""
    assert run_seed(3, rush=False).digest == run_seed(3, rush=False, on_engines=True).digest
