"""Which peers deliveries could go through, and in which order."""

from __future__ import annotations

from typing import Final

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics.figures.relays import relay_candidates
from federation.analytics.frames import RELAY_CANDIDATES, SERVER_DAILY, SERVER_SCORECARD, SERVERS
from tests.federation.analytics.rows import WINDOW, at, columns, daily, days, frame, server

WEEK: Final = days("11-24", "11-30")
SEEN: Final = {"last_seen": at("09-01 00:00")}
REINTRODUCED: Final = {"stale": {"last_seen": at("11-30 23:59")}}


def _url(name: str) -> str:
    return f"https://{name}.example"


NAMES: Final = ("best", "equal", "failing", "slow", "stale", "lucky", "half-relayed")
UNFIT: Final = {
    "down": ("unhealthy", "watch"),
    "refused": ("blacklisted", "keep"),
    "forger": ("healthy", "review-for-blacklist"),
    "only-relayed": ("healthy", "watch"),
    "idle": ("healthy", "keep"),
    "long-ago": ("healthy", "keep"),
}
DAILY: Final = [
    *(daily(_url(name), day, delivered=100) for day in WEEK for name in ("best", "equal", "down", "refused", "forger")),
    *(
        daily(_url("failing"), day, delivered=50, attempts=100, retryable=50, errors={"TIMEOUT": 40, "DATABASE": 10})
        for day in WEEK
    ),
    *(daily(_url("slow"), day, delivered=100, p95_ms=4_000) for day in WEEK),
    daily(_url("stale"), "11-24", delivered=700),
    daily(_url("lucky"), "11-30", delivered=1),
    *(daily(_url("half-relayed"), day, delivered=100, relayed_share=0.5) for day in WEEK),
    daily(_url("only-relayed"), "11-30", delivered=100, relayed_share=1.0),
    daily(_url("long-ago"), "11-23", delivered=100),
]


@pytest.fixture(scope="module")
def ranked(spark: SparkSession) -> dict[str, Row]:
    """The candidates by name."""
    judged = dict.fromkeys(NAMES, ("healthy", "keep")) | UNFIT
    cards = [
        dict.fromkeys(SERVER_SCORECARD.fieldNames())
        | {"server_url": _url(name), "window_days": length, "state": state, "action": action}
        for name, (state, action) in judged.items()
        for length in (7, 30)
    ]
    servers = frame(spark, SERVERS, [server(_url(name), **REINTRODUCED.get(name, SEEN)) for name in judged])
    result = relay_candidates(
        frame(spark, SERVER_DAILY, DAILY), frame(spark, SERVER_SCORECARD, cards), servers=servers, window=WINDOW
    )
    assert columns(result.schema) == columns(RELAY_CANDIDATES)
    rows = result.select("*", F.regexp_extract("server_url", "//(.*).example", 1).alias("name")).orderBy("rank")
    return {row["name"]: row for row in rows.collect()}


def test_candidates_are_ranked_without_gaps(ranked: dict[str, Row]) -> None:
    """From 1, the best first, by URL where scores are equal."""
    assert [row["rank"] for row in ranked.values()] == list(range(1, len(NAMES) + 1))
    assert list(ranked)[:2] == ["best", "equal"]
    scores = [row["score"] for row in ranked.values()]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("name", UNFIT)
def test_the_unfit_are_no_candidates(ranked: dict[str, Row], name: str) -> None:
    """Down, refused, suspicious, or without a direct delivery in a week: nothing should go through them."""
    assert name not in ranked


def test_scores_follow_the_formula(ranked: dict[str, Row]) -> None:
    """Availability with its two attempts of doubt, latency, and half of it for every three days without a delivery."""
    fresh = 0.5 ** (1 / 3)  # delivered on the last day, which has 24 hours
    assert ranked["best"]["score"] == pytest.approx(701 / 702 / 1.1 * fresh)
    assert ranked["failing"]["score"] == pytest.approx(351 / (700 - 70 + 2) / 1.1 * fresh)
    assert ranked["slow"]["score"] == pytest.approx(701 / 702 / 5 * fresh)
    assert ranked["stale"]["score"] == pytest.approx(701 / 702 / 1.1 * 0.5 ** (7 / 3))
    assert ranked["lucky"]["score"] == pytest.approx(2 / 3 / 1.1 * fresh)
    assert ranked["half-relayed"]["score"] == pytest.approx(351 / 702 / 1.1 * fresh)


def test_a_candidate_shows_what_it_rests_on(ranked: dict[str, Row]) -> None:
    """The plain share of direct deliveries, the typical p95, and when it was last seen by registry or delivery."""
    row = ranked["half-relayed"]
    assert (row["availability"], row["p95_ms"], row["as_of"]) == (0.5, 100, WINDOW.as_of)
    assert row["last_seen"] == at("11-30 00:00").replace(tzinfo=None)
