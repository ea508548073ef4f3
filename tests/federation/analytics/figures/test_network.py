"""The network's days, against figures worked out by hand."""

from __future__ import annotations

from datetime import date
from typing import Final

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import StructField, StructType, TimestampType

from federation.analytics.figures.checks import check_attempts
from federation.analytics.figures.daily import server_daily
from federation.analytics.figures.network import network_summary
from federation.analytics.figures.outages import find_outages
from federation.analytics.figures.tally import good, tally
from federation.analytics.frames import (
    ATTEMPTS,
    HEALTH_EVENTS,
    LOSSES,
    NETWORK_SUMMARY,
    SERVER_DAILY,
    SERVERS,
    Window,
)
from tests.federation.analytics.rows import NOW, at, attempt, columns, daily, event, failure, frame, loss, server

WINDOW: Final = Window(since=date(2026, 11, 17), until=date(2026, 11, 21))
SPELLS: Final = StructType([StructField(name, TimestampType()) for name in ("began_at", "ended_at")])


def _url(name: object) -> str:
    return f"https://{name}.example"


REGISTRY: Final = [
    server(_url("old")),
    server(_url("on-the-19th"), created_at=at("11-19 08:00")),
    server(_url("after-the-window"), created_at=at("11-21 00:00")),
    server(_url("over-midnight")),
    server(_url("back-by-evening")),
    server(_url("lost"), is_healthy=False),
]
EVENTS: Final = [
    event(_url("over-midnight"), "unhealthy", "11-18 23:00"),
    event(_url("over-midnight"), "healthy", "11-19 01:00"),
    event(_url("back-by-evening"), "unhealthy", "11-18 10:00"),
    event(_url("back-by-evening"), "healthy", "11-18 18:00"),
    event(_url("lost"), "unhealthy", "11-19 12:00"),
]
ATTEMPTED: Final = [
    # 20 November: 11 servers with an attempt each beside the one with half of all traffic.
    *(attempt(_url("hot"), duration_ms=100 * number) for number in range(1, 11)),
    failure(_url("hot"), "TIMEOUT"),
    failure(_url("hot"), "PARKED", outcome="parked"),
    *(attempt(_url(number), duration_ms=5000) for number in range(10)),
    failure(_url(10), "NOT_JSON", outcome="permanent"),
    # 18 November: nothing was delivered. 17 and 19 November: nothing at all, or only what is stored.
    failure(_url(1), "TIMEOUT", at("11-18 12:00")),
    failure(_url(2), "TIMEOUT", at("11-18 12:00")),
]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> list[Row]:
    """The four days, the 19th from a stored daily row."""
    counts = good(tally(check_attempts(frame(spark, ATTEMPTS, ATTEMPTED), window=WINDOW, now=NOW)))
    servers = frame(spark, SERVERS, REGISTRY)
    stored = frame(
        spark,
        SERVER_DAILY,
        [
            daily(_url(1), "11-19", delivered=8),
            daily(_url(1), "11-16", delivered=8),
            daily(_url(1), "11-21", delivered=8),
        ],
    )
    result = network_summary(
        counts,
        server_daily(counts).unionByName(stored),
        servers=servers,
        outages=find_outages(frame(spark, HEALTH_EVENTS, EVENTS), servers, until=at("11-21 00:00")),
        trouble=frame(spark, SPELLS, [{"began_at": at("11-17 21:30"), "ended_at": at("11-19 00:00")}]),
        lost=frame(spark, LOSSES, [loss(_url(1), str(day), f"11-{day} 23:00") for day in (17, 18, 18, 20)]),
        window=WINDOW,
    )
    assert columns(result.schema) == columns(NETWORK_SUMMARY)
    return result.orderBy("day").collect()


def test_each_day_of_the_window_has_one_row(rows: list[Row]) -> None:
    """Whether anything was attempted or not."""
    assert [row["day"] for row in rows] == list(WINDOW.days)


def test_servers_are_counted_at_the_days_end(rows: list[Row]) -> None:
    """Known from the day they came, healthy unless they are down when the day ends."""
    assert [row["servers_known"] for row in rows] == [4, 4, 5, 5]
    assert [row["servers_new"] for row in rows] == [0, 0, 1, 0]
    assert [row["servers_healthy"] for row in rows] == [4, 3, 4, 4]


def test_a_server_is_lost_on_the_day_it_goes_down_for_longer(rows: list[Row]) -> None:
    """Over midnight counts, back by evening does not, and a day later it is not lost again."""
    assert [row["servers_lost"] for row in rows] == [0, 1, 1, 0]


def test_traffic_is_summed(rows: list[Row]) -> None:
    """What was parked is no attempt; a stored day counts as one computed."""
    assert [row["attempts"] for row in rows] == [0, 2, 8, 22]
    assert [row["delivered"] for row in rows] == [0, 0, 8, 20]
    assert [row["success_rate"] for row in rows] == [None, 0.0, 1.0, pytest.approx(20 / 22)]
    assert [row["errors"] for row in rows] == [{}, {"TIMEOUT": 2}, {}, {"TIMEOUT": 1, "NOT_JSON": 1}]


def test_the_top_ten_have_their_share(rows: list[Row]) -> None:
    """Eleven attempts to one server and nine to the next: 20 of 22."""
    assert [row["top10_share"] for row in rows] == [None, 1.0, 1.0, pytest.approx(20 / 22)]


def test_latency_is_over_all_deliveries(rows: list[Row]) -> None:
    """Of 20 deliveries the 10th took 1 s, the 19th 5 s; without attempts at hand, or deliveries, there is none."""
    assert [(row["p50_ms"], row["p95_ms"]) for row in rows] == [(None, None), (None, None), (None, None), (1000, 5000)]


def test_losses_and_our_own_trouble_are_told_by_day(rows: list[Row]) -> None:
    """A spell lasts until midnight on the days before its last; one that ends at midnight has no part of the next."""
    assert [row["lost"] for row in rows] == [1, 2, 0, 1]
    assert [row["own_trouble"] for row in rows] == [["21:30 to 24:00"], ["00:00 to 24:00"], [], []]
