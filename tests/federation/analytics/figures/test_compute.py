"""All outputs together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from datetime import date
from typing import Final

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from federation.analytics import frames
from federation.analytics.figures.compute import compute
from federation.analytics.frames import Inputs, Outputs, Window
from federation.analytics.session import keeping
from tests.federation.analytics.rows import (
    NOW,
    WINDOW,
    Values,
    at,
    attempt,
    columns,
    daily,
    days,
    event,
    failure,
    inputs,
    refusal,
    server,
)

OUTPUTS: Final = [field.name for field in fields(Outputs) if field.name != "counts"]
A, B, C, STRANGER = (f"https://{name}.example" for name in ("a", "b", "c", "stranger"))

SERVERS: Final = [server(A), server(B), server(C, is_healthy=False, unhealthy_reason="TIMEOUT"), server("c.example")]
EVENTS: Final = [
    event(B, "unhealthy", "11-29 23:00"),
    event(B, "healthy", "11-30 01:00"),
    event(C, "unhealthy", "11-10 00:00"),
    event(C, "unhealthy", NOW.replace(year=2027)),
]
ATTEMPTS: Final = [
    *(attempt(A, at(f"{day} 12:00"), duration_ms=200) for day in days("11-01", "11-30")),
    *(attempt(A, at(f"{day} 12:30"), relayed_by=B) for day in days("11-20", "11-30")),
    *(failure(A, "HTTP_503", at(f"{day} 13:00"), http_status=503) for day in days("11-27", "11-30")),
    *(attempt(B, at(f"{day} 23:59")) for day in days("11-01", "11-29")),
    *(failure(C, "TIMEOUT", at(f"{day} 00:00")) for day in days("11-09", "11-30")),
    failure(STRANGER, "DISCOVERY", at("11-30 10:00")),
    attempt(STRANGER, at("11-30 11:00")),
    attempt(A, at("11-30 09:00"), id=1_000_000),
    attempt(A, at("11-30 09:00"), id=1_000_000),
    attempt(A, at("11-30 09:00"), duration_ms=-1),
    attempt(A, at("11-12 09:00"), outcome="unknown"),
]


def on_last_day(row: Values) -> bool:
    return row["started_at"] >= at("11-30 00:00")  # type: ignore[operator] # every row here has a time


@pytest.fixture(scope="module")
def nothing(spark: SparkSession) -> Iterator[Outputs]:
    """What comes of an empty database."""
    with keeping() as keep:
        yield compute(inputs(spark), window=WINDOW, now=NOW, keep=keep)


@pytest.fixture(scope="module")
def full(spark: SparkSession) -> dict[str, list[Row]]:
    """What comes of all of November at once."""
    blacklist = [refusal(STRANGER), refusal("?")]
    everything = inputs(spark, attempts=ATTEMPTS, servers=SERVERS, events=EVENTS, blacklist=blacklist)
    return collected(everything, WINDOW, *OUTPUTS)


def collected(made_of: Inputs, window: Window, *names: str) -> dict[str, list[Row]]:
    with keeping() as keep:
        outputs = compute(made_of, window=window, now=NOW, keep=keep)
        return {name: sorted(getattr(outputs, name).collect(), key=str) for name in names}


def test_what_is_kept_is_not_computed_again(nothing: Outputs) -> None:
    """No output is planned from the registry's or the events' rows themselves, which would be judged for each."""
    sources: set[tuple[str, str]] = set()
    for name in set(OUTPUTS) - {"quarantine"}:
        leaves = getattr(nothing, name)._jdf.queryExecution().withCachedData().collectLeaves()
        for leaf in (leaves.apply(index) for index in range(leaves.size())):
            columns_ = str(leaf.output().mkString(" "))
            sources |= {(mark, leaf.nodeName()) for mark in ("public_key#", "from_state#") if mark in columns_}
    assert sources == {("public_key#", "InMemoryRelation")}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_have_their_schemas(nothing: Outputs, name: str) -> None:
    """Whatever is written has the columns and types that are promised."""
    output: DataFrame = getattr(nothing, name)
    assert columns(output.schema) == columns(getattr(frames, name.upper()))


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "network_summary"])
def test_empty_inputs_have_empty_outputs(nothing: Outputs, name: str) -> None:
    """An empty database is no error: it has nothing to tell."""
    assert not getattr(nothing, name).collect()


def test_a_network_without_anything_has_its_days(nothing: Outputs) -> None:
    """Each day of the window is there, with counts of 0 and no ratios."""
    rows = nothing.network_summary.orderBy("day").collect()
    assert [row["day"] for row in rows] == list(WINDOW.days)
    told = {(row["servers_known"], row["attempts"], row["success_rate"], row["p95_ms"]) for row in rows}
    assert told == {(0, 0, None, None)}
    assert rows[0]["errors"] == {}


@pytest.mark.full
def test_a_year_without_anything_has_its_days(spark: SparkSession) -> None:
    """However long the window is."""
    year = Window(since=date(2025, 12, 1), until=date(2026, 12, 1))
    rows = collected(inputs(spark), year, "network_summary")["network_summary"]
    assert sorted(row["day"] for row in rows) == list(year.days)


@pytest.mark.full
def test_one_attempt_is_a_history(spark: SparkSession) -> None:
    """It is its server's day, its network's, and both of its scorecards."""
    single = inputs(spark, attempts=[attempt(STRANGER, duration_ms=70)])
    found = collected(single, WINDOW, *OUTPUTS)
    [day] = found["server_daily"]
    assert (day["attempts"], day["p50_ms"], day["p99_ms"]) == (1, 70, 70)
    assert [row["p95_ms"] for row in found["network_summary"] if row["attempts"]] == [70]
    assert [(row["window_days"], row["attempts"]) for row in found["server_scorecard"]] == [(30, 1), (7, 0)]
    assert not found["quarantine"]


def test_attempts_add_up(full: dict[str, list[Row]]) -> None:
    """What went in was counted once, by server and day and by day, or is in quarantine."""
    aside = Counter(row["reason"] for row in full["quarantine"] if row["source"] == "attempts")
    assert aside == {"duplicated id": 1, "negative duration": 1, "unknown outcome": 1}
    counted = sum(row["attempts"] + row["parked"] for row in full["server_daily"])
    assert counted + aside.total() == len(ATTEMPTS)
    assert counted == sum(row["attempts"] for row in full["network_summary"])


def test_quarantine_is_of_all_inputs(full: dict[str, list[Row]]) -> None:
    """A bad row of the registry, the blacklist or the events is no more silent than an attempt."""
    others = {(row["source"], row["reason"]) for row in full["quarantine"] if row["source"] != "attempts"}
    assert others == {
        ("servers", "malformed URL"),
        ("blacklist", "malformed URL"),
        ("health_events", "time in the future"),
    }


def test_servers_nobody_registered_have_days_and_cards(full: dict[str, list[Row]]) -> None:
    """Somebody reaches them, so there is something to look at."""
    assert [row["errors"] for row in full["server_daily"] if row["server_url"] == STRANGER] == [{"DISCOVERY": 1}]
    assert {row["server_url"] for row in full["server_scorecard"]} == {A, B, C, STRANGER}


def test_a_sick_server_is_told_with_its_reason(full: dict[str, list[Row]]) -> None:
    """The row an operator acts on: what to do, since when it is so, and why."""
    [card] = [row for row in full["server_scorecard"] if (row["server_url"], row["window_days"]) == (C, 30)]
    assert (card["action"], card["reasons"]) == (
        "park",
        ["down since 2026-11-10 (21 days), last error TIMEOUT"],
    )
    assert [row["server_url"] for row in full["relay_candidates"]] == [B, A]


def test_a_day_computed_on_stored_days_is_as_computed_at_once(spark: SparkSession, full: dict[str, list[Row]]) -> None:
    """The last day's attempts and the stored rows of the days before give the same cards, ranking and day.

    A stored row of a day that is computed is passed over: the attempts came later.
    """
    stored = [row.asDict() for row in full["server_daily"] if row["day"] < date(2026, 11, 30)]
    outdated = daily(B, "11-30", delivered=1_000)
    last_day = inputs(
        spark,
        attempts=filter(on_last_day, ATTEMPTS),
        servers=SERVERS,
        events=EVENTS,
        blacklist=[refusal(STRANGER)],
        stored=[*stored, outdated],
    )
    window = Window(since=date(2026, 11, 30), until=date(2026, 12, 1))
    found = collected(last_day, window, "server_daily", "server_scorecard", "relay_candidates", "network_summary")
    assert found["server_scorecard"] == full["server_scorecard"]
    assert found["relay_candidates"] == full["relay_candidates"]
    for name in ("server_daily", "network_summary"):
        assert found[name] == [row for row in full[name] if row["day"] == date(2026, 11, 30)]
