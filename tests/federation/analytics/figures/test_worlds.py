"""What is advised is what a thoughtful operator would do, about servers beside each other and with our own outages."""

from __future__ import annotations

from operator import itemgetter
from typing import Final, TypeAlias

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from federation.analytics.figures.compute import compute
from federation.analytics.frames import (
    ACCEPTED_KEYS,
    ATTEMPTS,
    BLACKLIST,
    DELIVERIES,
    HEALTH_EVENTS,
    LINKS,
    LOSSES,
    SERVERS,
    Action,
    Inputs,
)
from federation.analytics.session import keeping
from tests.federation.analytics.figures.test_truth import ARGUED
from tests.federation.analytics.figures.truth import EVERYBODY
from tests.federation.analytics.figures.worlds import ORDINARY, UPLINK, WORLDS, World
from tests.federation.analytics.rows import NOW, WINDOW, Values, frame

Advised: TypeAlias = dict[str, tuple[Action | None, list[str]]]

AGREEMENT: Final = 0.98
_ALWAYS: Final = (ORDINARY, UPLINK)


def advised(spark: SparkSession, world: World) -> tuple[dict[str, Action | None], Advised]:
    """The advice that was written down, and that which is computed; None for a server that nothing is said of."""
    pasts = list(world.pasts())

    def all_of(schema: StructType, name: str, *, in_order: str | None = None) -> DataFrame:
        rows: list[Values] = [row for past, _ in pasts for row in getattr(past, name)]
        if in_order is not None:
            rows = [{**row, "id": place} for place, row in enumerate(sorted(rows, key=itemgetter(in_order)))]
        return frame(spark, schema, rows)

    inputs = Inputs(
        attempts=all_of(ATTEMPTS, "attempts"),
        servers=all_of(SERVERS, "registered"),
        blacklist=all_of(BLACKLIST, "refusals"),
        health_events=all_of(HEALTH_EVENTS, "events", in_order="at"),
        links=all_of(LINKS, "links"),
        deliveries=all_of(DELIVERIES, "deliveries"),
        losses=all_of(LOSSES, "losses"),
        accepted_keys=all_of(ACCEPTED_KEYS, "accepted"),
    )
    with keeping(few_servers=True) as keep:
        cards = compute(inputs, window=WINDOW, now=NOW, keep=keep).server_scorecard
        rows = cards.select("server_url", "action", "reasons").distinct().collect()
    assert len({row["server_url"] for row in rows}) == len(rows), "a server has two verdicts"
    found: Advised = {past.url: (None, []) for past, _ in pasts}
    found |= {row["server_url"]: (Action(row["action"]), row["reasons"]) for row in rows}
    return {past.url: advice for past, advice in pasts}, found


@pytest.mark.parametrize(
    "world",
    [ORDINARY, UPLINK, *(pytest.param(world, marks=pytest.mark.full) for world in WORLDS if world not in _ALWAYS)],
    ids=lambda world: world.name,
)
def test_the_advice_is_a_thoughtful_operators(spark: SparkSession, world: World) -> None:
    """On every server of each federation."""
    wanted, found = advised(spark, world)
    differs = {url: (wanted[url], *found[url]) for url in wanted if found[url][0] is not wanted[url]}
    assert not differs


def test_they_are_many_and_few_are_argued_about() -> None:
    """Those of which one may differ are of the servers told one by one; all others get what was written down."""
    assert len(EVERYBODY) + sum(len(world.lives) for world in WORLDS) >= 450
    assert len(ARGUED) <= (1 - AGREEMENT) * (len(EVERYBODY) + len(ORDINARY.lives) + len(UPLINK.lives))
