"""A server's day, against figures worked out by hand."""

from __future__ import annotations

from datetime import date
from typing import Final

import pytest
from pyspark.sql import Row, SparkSession

from federation.analytics.figures.checks import check_attempts
from federation.analytics.figures.daily import server_daily
from federation.analytics.figures.tally import good, tally
from federation.analytics.frames import ATTEMPTS, SERVER_DAILY
from tests.federation.analytics.rows import NOW, WINDOW, at, attempt, columns, failure, frame

A, B, C, D, E = (f"https://{name}.example" for name in "abcde")
RELAY: Final = "https://relay.example"
UNKNOWN: Final = "INVALID_RESPONSE_FROM_TARGET"

ATTEMPTED: Final = [
    # A: 20 attempts, 1 of them delivered through a relay; the failures take 15 s and must not show in the percentiles.
    *(attempt(A, duration_ms=10 * number) for number in range(1, 16)),
    attempt(A, duration_ms=160, relayed_by=RELAY, response_bytes=None),
    failure(A, "TIMEOUT", duration_ms=15_000),
    failure(A, "TIMEOUT", duration_ms=15_000),
    failure(A, "HTTP_503", http_status=503, response_bytes=7),
    failure(A, "NO_ACK", outcome="permanent"),
    failure(A, "PARKED", outcome="parked", request_bytes=None),
    # A again: a minute before midnight and a moment after it, in UTC.
    attempt(A, at("11-21 23:59")),
    attempt(A, at("11-22 00:00")),
    # B: only relayed traffic.
    attempt(B, relayed_by=RELAY),
    failure(B, UNKNOWN, relayed_by=RELAY),
    # C: nothing but parked.
    failure(C, "PARKED", outcome="parked", request_bytes=None),
    # D: nothing delivered.
    failure(D, "CONN_REFUSED"),
    # E: the clock was set back between two attempts; the later one counts where its clock says.
    attempt(E, at("11-21 00:01"), id=900_001),
    attempt(E, at("11-20 23:59"), id=900_002),
]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> dict[tuple[str, date], Row]:
    """The daily rows of all the attempts above, by server and day."""
    judged = check_attempts(frame(spark, ATTEMPTS, ATTEMPTED), window=WINDOW, now=NOW)
    result = server_daily(good(tally(judged)))
    assert columns(result.schema) == columns(SERVER_DAILY)
    return {(row["server_url"], row["day"]): row for row in result.collect()}


def test_a_day_counts_attempts_by_outcome(rows: dict[tuple[str, date], Row]) -> None:
    """Attempts are those delivered, to be retried and failed for good; what was parked is told apart."""
    day = rows[A, date(2026, 11, 20)]
    assert (day["attempts"], day["delivered"], day["retryable"], day["permanent"], day["parked"]) == (20, 16, 3, 1, 1)
    assert day["errors"] == {"TIMEOUT": 2, "HTTP_503": 1, "NO_ACK": 1}
    assert day["availability"] == 16 / 20
    assert day["relayed_share"] == 1 / 16
    assert (day["request_bytes"], day["response_bytes"]) == (20_000, 15 * 500 + 7)


def test_latency_is_that_of_deliveries(rows: dict[tuple[str, date], Row]) -> None:
    """Of 16 deliveries in 10, 20 … 160 ms the 8th and the last; two timeouts change nothing."""
    day = rows[A, date(2026, 11, 20)]
    assert (day["p50_ms"], day["p95_ms"], day["p99_ms"]) == (80, 160, 160)


def test_a_day_ends_at_midnight_utc(rows: dict[tuple[str, date], Row]) -> None:
    """A minute later is another day."""
    assert (rows[A, date(2026, 11, 21)]["attempts"], rows[A, date(2026, 11, 22)]["attempts"]) == (1, 1)


def test_relayed_deliveries_are_deliveries(rows: dict[tuple[str, date], Row]) -> None:
    """A server reached through relays only is available, with a relayed share of 1."""
    day = rows[B, date(2026, 11, 20)]
    assert (day["delivered"], day["availability"], day["relayed_share"]) == (1, 0.5, 1.0)
    assert day["errors"] == {UNKNOWN: 1}


def test_parked_is_no_attempt(rows: dict[tuple[str, date], Row]) -> None:
    """A day of nothing but waiting has no ratios and no errors."""
    day = rows[C, date(2026, 11, 20)]
    assert (day["attempts"], day["parked"], day["availability"], day["relayed_share"]) == (0, 1, None, None)
    assert (day["errors"], day["p95_ms"], day["request_bytes"]) == ({}, None, 0)


def test_nothing_delivered_has_no_latency(rows: dict[tuple[str, date], Row]) -> None:
    """Then nothing was relayed either: there is nothing to have a share of."""
    day = rows[D, date(2026, 11, 20)]
    assert (day["availability"], day["relayed_share"], day["p50_ms"]) == (0.0, None, None)


def test_a_clock_set_back_moves_attempts_only_to_another_day(rows: dict[tuple[str, date], Row]) -> None:
    """Each attempt counts once, on the day its own time lies in."""
    assert (rows[E, date(2026, 11, 20)]["attempts"], rows[E, date(2026, 11, 21)]["attempts"]) == (1, 1)
