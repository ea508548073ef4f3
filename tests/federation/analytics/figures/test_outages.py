"""Outages and what they come to, against figures worked out by hand. A window ends with 30 November."""

from __future__ import annotations

from datetime import timedelta
from typing import Final, TypeAlias

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics.figures.checks import check_health_events
from federation.analytics.figures.outages import find_outages, outage_figures
from federation.analytics.frames import HEALTH_EVENTS, SERVERS
from tests.federation.analytics.rows import NOW, Values, at, by_server, event, frame, server

UNTIL: Final = at("12-01 00:00")
HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
SICK: Final = {
    "is_healthy": False,
    "unhealthy_reason": "TLS_ERROR",
    "last_seen": at("09-01 00:00"),
    "updated_at": at("11-12 00:00"),
}

Found: TypeAlias = tuple[dict[str, list[Row]], dict[str, list[Row]]]
"""Outages, and figures per window, by server."""


def _url(name: str) -> str:
    return f"https://{name}.example"


def _events(name: str, *changes: tuple[str, str]) -> list[Values]:
    return [event(_url(name), state, moment) for moment, state in changes]


REGISTRY: Final = [
    *(server(_url(name)) for name in ("never", "midnight", "edge", "repeats", "backwards")),
    *(server(_url(name)) for name in ("first-recovery", "flapping", "healed", "later")),
    server(_url("open"), **SICK),
    server(_url("unrecorded"), **SICK),
    server(_url("relapsed"), **SICK),
    server(_url("young"), created_at=at("11-29 00:00")),
    server(_url("since-tonight"), **SICK),
]
EVENTS: Final = [
    *_events("midnight", ("11-27 23:00", "unhealthy"), ("11-28 02:00", "healthy")),
    *_events("edge", ("11-22 12:00", "unhealthy"), ("11-24 12:00", "healthy")),
    *_events("open", ("11-12 00:00", "unhealthy")),
    *_events(
        "repeats",
        ("11-27 10:00", "unhealthy"),
        ("11-27 11:00", "unhealthy"),
        ("11-27 12:00", "healthy"),
        ("11-27 13:00", "healthy"),
    ),
    # The clock was set back while it was down: by its events it healed before it fell ill.
    *_events("backwards", ("11-27 12:00", "unhealthy"), ("11-27 11:50", "healthy")),
    *_events("first-recovery", ("11-26 00:00", "healthy")),
    *_events(
        "flapping",
        ("11-25 00:00", "unhealthy"),
        ("11-25 01:00", "healthy"),
        ("11-26 00:00", "unhealthy"),
        ("11-26 02:00", "healthy"),
        ("11-27 00:00", "unhealthy"),
        ("11-27 03:00", "healthy"),
    ),
    # The recovery was not recorded; the registry knows of it.
    *_events("healed", ("11-29 00:00", "unhealthy")),
    *_events("relapsed", ("11-02 00:00", "unhealthy"), ("11-03 00:00", "healthy")),
    *_events("young", ("11-29 12:00", "unhealthy"), ("11-30 00:00", "healthy")),
    # Recovered after the window: at its end it was down.
    *_events("later", ("11-30 12:00", "unhealthy"), ("12-01 01:00", "healthy")),
    # Went down after the window: in it, it was up.
    *_events("since-tonight", ("12-01 01:00", "unhealthy")),
    *_events("stranger", ("11-30 12:00", "unhealthy")),
]


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> Found:
    """All outages, and the figures of the last 7 days (first) and of the last 30, by server."""
    servers = frame(spark, SERVERS, REGISTRY)
    events = check_health_events(frame(spark, HEALTH_EVENTS, EVENTS), now=NOW).good
    outages = find_outages(events, servers, until=UNTIL).cache()
    windows = servers.select(
        F.col("url").alias("server_url"),
        F.explode(F.array(F.lit(7), F.lit(30))).alias("window_days"),
        F.lit(UNTIL).alias("ends_at"),
        "created_at",
    )
    length = F.make_dt_interval(F.col("window_days"))
    windows = windows.withColumn("begins_at", F.greatest("created_at", F.col("ends_at") - length)).drop("created_at")
    figures = outage_figures(windows, outages).orderBy("window_days")
    result = by_server(outages.orderBy("began_at")), by_server(figures)
    outages.unpersist()
    return result


def spans(found: Found, name: str) -> list[tuple[object, object]]:
    """Begin and end of a server's outages, as texts."""
    return [
        tuple(moment and f"{moment:%m-%d %H:%M}" for moment in (row["began_at"], row["ended_at"]))  # type: ignore[misc] # mypy does not count a generator's items
        for row in found[0].get(_url(name), [])
    ]


def figures(found: Found, name: str, *, days: int) -> Row:
    [row] = [row for row in found[1][_url(name)] if row["window_days"] == days]
    return row


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "never": [],
        "midnight": [("11-27 23:00", "11-28 02:00")],
        "edge": [("11-22 12:00", "11-24 12:00")],
        "open": [("11-12 00:00", None)],
        "repeats": [("11-27 10:00", "11-27 12:00")],
        "backwards": [("11-27 12:00", "11-27 12:00")],
        "first-recovery": [(None, "11-26 00:00")],
        "healed": [("11-29 00:00", "11-30 00:00")],
        "unrecorded": [("09-01 00:00", None)],  # last seen, whenever it was last probed
        "relapsed": [("11-02 00:00", "11-03 00:00"), ("11-03 00:00", None)],
        "later": [("11-30 12:00", None)],
        "since-tonight": [],
        "stranger": [],
    }.items(),
)
def test_outages_are_told_from_events_and_registry(
    found: Found, name: str, expected: list[tuple[str | None, str | None]]
) -> None:
    """From the change to unhealthy to the next recovery; where events and registry differ, the registry is right."""
    assert spans(found, name) == expected


def test_a_server_that_never_failed_has_no_means(found: Found) -> None:
    """No failure: no time to failure, no time to repair, an uptime of 1."""
    row = figures(found, "never", days=30)
    assert (row["failures"], row["mttf_s"], row["mttr_s"], row["longest_outage_s"], row["uptime"]) == (
        0,
        None,
        None,
        0.0,
        1.0,
    )


def test_an_outage_over_midnight_is_one(found: Found) -> None:
    """Days are nothing to it: 3 hours, once."""
    row = figures(found, "midnight", days=7)
    assert (row["failures"], row["mttr_s"], row["longest_outage_s"]) == (1, 3 * HOUR, 3 * HOUR)
    assert row["mttf_s"] == 7 * DAY - 3 * HOUR


def test_an_outage_over_the_edge_ends_in_the_window(
    found: Found,
) -> None:
    """It is no failure of the last 7 days, but a repair, at its whole length; the window was down for 12 hours."""
    row = figures(found, "edge", days=7)
    assert (row["failures"], row["mttf_s"], row["mttr_s"], row["longest_outage_s"]) == (0, None, 2 * DAY, 2 * DAY)
    assert row["uptime"] == pytest.approx(1 - 0.5 / 7)
    assert figures(found, "edge", days=30)["failures"] == 1


def test_an_open_outage_lasts_to_the_windows_end(found: Found) -> None:
    """It is not repaired, and 19 days long by the end of November."""
    week, month = figures(found, "open", days=7), figures(found, "open", days=30)
    assert (week["failures"], week["mttr_s"], week["uptime"]) == (0, None, 0.0)
    assert week["longest_outage_s"] == month["longest_outage_s"] == 19 * DAY
    assert (month["failures"], month["mttf_s"], month["mttr_s"]) == (1, 11 * DAY, None)


def test_means_are_over_all_failures(found: Found) -> None:
    """Down for 1, 2 and 3 hours: up for 162 of 168 hours, so 54 hours to a failure, 2 hours to a repair."""
    row = figures(found, "flapping", days=7)
    assert (row["failures"], row["mttf_s"], row["mttr_s"], row["longest_outage_s"]) == (
        3,
        54 * HOUR,
        2 * HOUR,
        3 * HOUR,
    )


def test_an_unrecorded_begin_counts_from_the_windows(
    found: Found,
) -> None:
    """It has no length to be averaged and is nobody's failure, but the window was down until it ended."""
    row = figures(found, "first-recovery", days=7)
    assert (row["failures"], row["mttr_s"], row["longest_outage_s"]) == (0, None, 2 * DAY)
    assert row["uptime"] == pytest.approx(5 / 7)


def test_a_clock_set_back_makes_no_negative_outage(found: Found) -> None:
    """It counts as a failure of no length."""
    row = figures(found, "backwards", days=7)
    assert (row["failures"], row["mttr_s"], row["longest_outage_s"], row["uptime"]) == (1, 0.0, 0.0, 1.0)


def test_a_server_is_observed_since_it_is_known(found: Found) -> None:
    """Known for two days and down for half of one: up for three quarters of its window, be it 7 days or 30."""
    for days in (7, 30):
        row = figures(found, "young", days=days)
        assert row["uptime"] == 0.75
        assert row["mttf_s"] == timedelta(days=1.5).total_seconds()
