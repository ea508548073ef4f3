"""Which rows go on, which are set aside, and why."""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it
from pyspark.sql.types import DateType, LongType, StringType, StructField, StructType

from federation.analytics.figures import duplicates
from federation.analytics.figures.checks import check_attempts, check_blacklist, check_health_events, check_servers
from federation.analytics.figures.quarantine import Checked
from federation.analytics.figures.tally import bad, tally
from federation.analytics.frames import ATTEMPTS, BLACKLIST, HEALTH_EVENTS, QUARANTINE, SERVERS
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin
from tests.federation.analytics.rows import (
    NOW,
    WINDOW,
    Values,
    at,
    attempt,
    columns,
    event,
    failure,
    frame,
    refusal,
    server,
)

GOOD: Final = {
    "delivered": attempt(),
    "delivered-202": attempt(http_status=202),
    "delivered-relayed": attempt(relayed_by="https://relay.example"),
    "delivered-before": attempt(http_status=409),
    "delivered-no-status": attempt(http_status=None),
    "retryable-timeout": failure("https://a.example", "TIMEOUT"),
    "retryable-503": failure("https://a.example", "HTTP_503", http_status=503),
    "permanent": failure("https://a.example", "NO_ACK", outcome="permanent", http_status=200),
    "parked": failure("https://a.example", "PARKED", outcome="parked"),
    "no-sizes": attempt(request_bytes=None, response_bytes=None),
    "instant": attempt(duration_ms=0),
    "first-moment": attempt(started_at=at("11-01 00:00")),
    "last-moment": attempt(started_at=at("11-30 23:59") + timedelta(seconds=59, microseconds=999_999)),
    "port": attempt("https://a.example:8443"),
    "ipv6": attempt("http://[2001:db8::1]:8080"),
    "underscore": attempt("http://node_1"),
}
BAD: Final = {
    "no id": attempt(id=None),
    "no time": attempt(started_at=None) | {"started_at": None},
    "time in the future": attempt(started_at=NOW + timedelta(hours=2)),
    "malformed URL": attempt("no url"),
    "malformed URL of the relay": attempt(relayed_by="relay"),
    "time before 2000": attempt(started_at=datetime(1970, 1, 1, tzinfo=UTC)),
    "no duration": attempt(duration_ms=None),
    "negative duration": attempt(duration_ms=-1),
    "negative size": attempt(response_bytes=-1),
    "unknown outcome": attempt(outcome="lost"),
    "unknown error code": failure("https://a.example", "GREMLINS"),
    "outcome contradicts the error code": attempt(error_code="TIMEOUT"),
    "outcome contradicts the HTTP status": attempt(http_status=503),
}
MORE_BAD: Final = {
    "no-outcome": (attempt(outcome=None), "unknown outcome"),
    "no-url": (attempt(server_url=None), "malformed URL"),
    "negative-request": (attempt(request_bytes=-5), "negative size"),
    "far-future": (attempt(started_at=datetime(9999, 12, 31, tzinfo=UTC)), "time in the future"),
    "the-last-second": (
        attempt(started_at=datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
        "time before 2000",
    ),
    "year-1": (attempt(started_at=datetime(1, 1, 1, tzinfo=UTC)), "time before 2000"),
    "no-code": (failure("https://a.example", "TIMEOUT", error_code=None), "outcome contradicts the error code"),
    "2xx-code": (failure("https://a.example", "HTTP_200"), "unknown error code"),
    "code-with-a-newline": (failure("https://a.example", "HTTP_503\n"), "unknown error code"),
    "permanent-timeout": (
        failure("https://a.example", "TIMEOUT", outcome="permanent"),
        "outcome contradicts the error code",
    ),
    "parked-without-code": (attempt(outcome="parked", http_status=None), "outcome contradicts the error code"),
    "other-status": (
        failure("https://a.example", "HTTP_503", http_status=500),
        "outcome contradicts the HTTP status",
    ),
    "the-first-reason-counts": (attempt("no url", duration_ms=-1), "malformed URL"),
}
OUTSIDE: Final = [attempt(started_at=at("10-31 23:59")), attempt(started_at=at("12-01 00:00"))]


def judged(spark: SparkSession, rows: list[Values]) -> Checked:
    """The good ones of the rows, and what becomes of the others."""
    attempts = check_attempts(frame(spark, ATTEMPTS, rows), window=WINDOW, now=NOW)
    return Checked(good=attempts.where(F.col("reason").isNull()), bad=bad(tally(attempts)))


@pytest.fixture(scope="module")
def checked(spark: SparkSession) -> Checked:
    """All the attempts above, judged together."""
    return judged(spark, [*GOOD.values(), *BAD.values(), *(row for row, _ in MORE_BAD.values()), *OUTSIDE])


@pytest.fixture(scope="module")
def good_ids(checked: Checked) -> set[int]:
    return {row["id"] for row in checked.good.select("id").collect()}


@pytest.fixture(scope="module")
def quarantined(checked: Checked) -> list[Row]:
    return checked.bad.collect()


def reasons_of(quarantined: list[Row], row: Values) -> list[str]:
    """Why `row` is in quarantine: once, or not at all."""
    return [found["reason"] for found in quarantined if json.loads(found["row"])["id"] == row["id"]]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_attempt_goes_on(good_ids: set[int], quarantined: list[Row], name: str) -> None:
    """What the delivery code writes is counted."""
    assert GOOD[name]["id"] in good_ids
    assert not reasons_of(quarantined, GOOD[name])


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_attempt_is_set_aside_with_its_reason(good_ids: set[int], quarantined: list[Row], reason: str) -> None:
    """Each kind of nonsense has words of its own."""
    assert BAD[reason]["id"] not in good_ids
    assert reasons_of(quarantined, BAD[reason]) == [reason]


@pytest.mark.parametrize("name", MORE_BAD)
def test_a_bad_attempt_is_set_aside_once(good_ids: set[int], quarantined: list[Row], name: str) -> None:
    """Under the first reason that holds, so that counts add up."""
    row, reason = MORE_BAD[name]
    assert row["id"] not in good_ids
    assert reasons_of(quarantined, row) == [reason]


def test_attempts_of_other_times_are_not_judged(good_ids: set[int], quarantined: list[Row]) -> None:
    """They were not asked for: neither counted nor set aside."""
    for row in OUTSIDE:
        assert row["id"] not in good_ids
        assert not reasons_of(quarantined, row)


def test_quarantine_keeps_the_whole_row(checked: Checked, quarantined: list[Row]) -> None:
    """Whoever looks for the cause finds all columns, times in UTC, and the day where there is one."""
    assert columns(checked.bad.schema) == columns(QUARANTINE)
    row = next(found for found in quarantined if found["reason"] == "negative duration")
    kept = json.loads(row["row"])
    assert list(kept) == ATTEMPTS.fieldNames()
    assert kept["started_at"] == "2026-11-20T12:00:00.000Z"
    assert (row["source"], row["day"]) == ("attempts", date(2026, 11, 20))
    for reason in ("no time", "time before 2000"):
        assert next(found for found in quarantined if found["reason"] == reason)["day"] is None
    future = {found["day"] for found in quarantined if found["reason"] == "time in the future"}
    assert future == {None}


def test_days_are_utc_days_in_every_time_zone(spark: SparkSession) -> None:
    """A session in another time zone counts an attempt on the same day."""
    late = attempt(started_at=at("11-20 23:30"))
    negative = attempt(started_at=at("11-20 23:30"), duration_ms=-1)
    before = spark.conf.get("spark.sql.session.timeZone")
    assert before is not None
    try:
        for zone in ("Pacific/Kiritimati", "America/Los_Angeles"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            checked = judged(spark, [late, negative])
            assert [row["day"] for row in checked.good.collect()] == [date(2026, 11, 20)]
            [row] = checked.bad.collect()
            assert row["day"] == date(2026, 11, 20)
            assert json.loads(row["row"])["started_at"] == "2026-11-20T23:30:00.000Z"
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_an_id_counts_once_a_day(spark: SparkSession) -> None:
    """Of good rows that share an id on a day one stays; a bad one among them and another day's are not their copies."""
    same = attempt(id=7)
    rows = [same, same, attempt(id=7, duration_ms=5), attempt(id=7, duration_ms=-1)]
    elsewhere = [attempt(id=7, started_at=at("11-21 00:00")), attempt(id=8), attempt(id=7 + 64)]
    checked = judged(spark, [*rows, *elsewhere])
    kept = sorted((row["id"], row["day"].day, row["duration_ms"]) for row in checked.good.collect())
    assert kept == [(7, 20, 5), (7, 21, 100), (8, 20, 100), (71, 20, 100)]
    assert Counter(row["reason"] for row in checked.bad.collect()) == {"duplicated id": 2, "negative duration": 1}


def test_however_many_duplicates_there_are_the_slots_are_few(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each task is told of them does not grow; rows that share a slot with copies are told apart all the same."""
    monkeypatch.setattr(duplicates, "SLOTS", 4)
    twice = [{"id": 64 * number, "day": date(2026, 11, 20), "reason": None} for number in range(40)] * 2
    alone = [{"id": 64 * number + 1, "day": date(2026, 11, 20), "reason": None} for number in range(100)]
    schema = StructType(
        [StructField("id", LongType()), StructField("day", DateType()), StructField("reason", StringType())]
    )
    rows = frame(spark, schema, [*twice, *alone])
    found = duplicates.find_duplicates(rows.select("id"))
    assert 1 <= found.slots.count() <= 4
    marked = Counter(row["reason"] for row in found.mark(rows, order=["id"]).collect())
    assert marked == {None: 140, "duplicated id": 40}


def test_ten_billion_attempts_leave_most_slots_empty(spark: SparkSession) -> None:
    """Slots are filled as chance would: of 10^10 attempts with 10^5 copies one in twenty is looked at."""

    def filled(crowded: int) -> float:
        return 1 - math.exp(-crowded / duplicates.SLOTS)

    ids = spark.range(20_000).selectExpr("id * 64 AS id")
    found = duplicates.find_duplicates(ids.unionAll(ids)).slots.count() / duplicates.SLOTS
    assert found == pytest.approx(filled(20_000), rel=0.02)
    assert filled(10**5) < 0.05
    assert duplicates.SLOTS * 24 < 64 * 2**20


def _sound() -> st.SearchStrategy[Values]:
    """Good attempts of few ids and two days, so that many are copies of each other."""
    ids, days = st.integers(0, 12), st.sampled_from(["11-01 12:00", "11-02 12:00"])
    return st.builds(lambda number, day, took: attempt(id=number, started_at=at(day), duration_ms=took), ids, days, ids)


def _mangled() -> st.SearchStrategy[Values]:
    """Attempts as nobody would write them, most of them with ids that occur more than once."""
    return st.fixed_dictionaries(
        {
            "id": st.none() | st.integers(0, 12) | st.integers(-(2**63), 2**63 - 1),
            "server_url": st.sampled_from(["https://a.example", "https://b.example", "", "https://a b", None]),
            "started_at": st.none() | st.datetimes(datetime(2026, 11, 1), datetime(2026, 11, 3)).map(_in_utc),  # noqa: DTZ001 - hypothesis wants naive bounds
            "duration_ms": st.none() | st.integers(-(2**31), 2**31 - 1),
            "outcome": st.sampled_from(["delivered", "retryable", "permanent", "parked", "DELIVERED", None]),
            "error_code": st.sampled_from([None, None, "TIMEOUT", "NO_ACK", "PARKED", "HTTP_500", "HTTP_x", "?"]),
            "http_status": st.sampled_from([None, 200, 500, -1]),
            "relayed_by": st.sampled_from([None, "https://r.example", "r"]),
            "request_bytes": st.none() | st.integers(-1, 10),
            "response_bytes": st.none() | st.integers(-1, 10),
        }
    ).map(lambda changes: {**attempt(), **changes})


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC)


@settings(max_examples=3, deadline=None)
@given(rows=st.lists(_sound() | _mangled(), min_size=30, max_size=60))
def test_attempts_in_are_attempts_out_and_quarantined(spark: SparkSession, rows: list[Values]) -> None:
    """Whatever the rows hold, each is counted on one side exactly, and no id is twice good on a day."""
    checked = judged(spark, rows)
    good = checked.good.select("id", "day").collect()
    assert len(good) + checked.bad.count() == len(rows)
    assert len(set(good)) == len(good)


URLS: Final = [
    "https://a.example",
    "http://a.example",
    "https://a.example:8443",
    "https://xn--bcher-kva.example",
    "http://[2001:db8::1]:80",
    "http://127.0.0.1:3000",
    "http://node_1:3000",
    "https://" + "a." * 126 + "a",
    "https://" + "a." * 126 + "ab",
    "https://" + "a." * 1000 + "a",
    "https://" + "a" * 64 + ".example",
    "https://" + "a" * 63,
    "https://" + "a" * 64,
    "https://" + "a" * 61 + ".a",
    "https://" + "a" * 62 + ".a",
    "https://a..example",
    "https://a.example..",
    "https://a.example.",
    "https://.a.example",
    "https://-a_1.example",
    "https://A.example",
    "https://user@a.example",
    "https://user:secret@a.example",
    "https://",
    "https:// a.example",
    "https://a.example\n",
    "https://a.example/\x00",
    "ftp://a.example",
    "a.example",
    "",
    "https://a.example:port",
    "https://a.example:1234567890",
    "https://bücher.example",
    "https://a.example/" + "x" * 3000,
]


def test_malformed_urls_are_those_that_name_no_server(spark: SparkSession) -> None:
    """The check in Spark agrees with `canonical_origin`, but that it wants names in ASCII, as they are stored."""
    rows = [refusal(url) for url in URLS]
    checked = check_blacklist(frame(spark, BLACKLIST, rows))
    good = {row["server_url"] for row in checked.good.collect()}
    assert good == {url for url in URLS if url.isascii() and _is_acceptable(url)}


def _is_acceptable(url: str) -> bool:
    try:
        canonical_origin(url)
    except UrlError:
        return False
    return True


def _outcome(checked: Checked, column: str) -> tuple[list[str], list[tuple[str, str]]]:
    """What stayed, by one of its columns, and what was set aside, with the reason."""
    bad = checked.bad.select("reason", F.get_json_object("row", f"$.{column}").alias("value")).collect()
    return sorted(row[column] for row in checked.good.collect()), sorted((row["value"], row["reason"]) for row in bad)


def test_registry_rows_are_judged(spark: SparkSession) -> None:
    """A server without a state or a name says nothing; of rows with one URL the latest stays.

    A wrong time is told, and spoils itself alone.
    """
    rows = [
        server("https://a.example"),
        server("https://bad-key.example", public_key=None),
        server("https://twice.example", id="old", updated_at=at("11-01 00:00")),
        server("https://twice.example", id="new", updated_at=at("11-02 00:00")),
        server("nowhere", id="nowhere"),
        server("https://limbo.example", id="limbo", is_healthy=None),
        server("https://unborn.example", id="unborn", created_at=None),
        server("https://tomorrow.example", id="tomorrow", last_seen=NOW + timedelta(days=1)),
        server("https://next-year.example", id="next-year", created_at=NOW + timedelta(days=365)),
    ]
    checked = check_servers(frame(spark, SERVERS, rows), now=NOW)
    assert _outcome(checked, "id") == (
        ["id of https://a.example", "id of https://bad-key.example", "new", "next-year", "tomorrow", "unborn"],
        [
            ("limbo", "no state"),
            ("next-year", "time in the future"),
            ("nowhere", "malformed URL"),
            ("old", "duplicated URL"),
            ("tomorrow", "time in the future"),
            ("unborn", "no time"),
        ],
    )
    times = {row["id"]: (row["created_at"] is None, row["last_seen"] is None) for row in checked.good.collect()}
    assert {id_: times[id_] for id_ in ("new", "next-year", "tomorrow", "unborn")} == {
        "new": (False, False),
        "next-year": (True, False),
        "tomorrow": (False, True),
        "unborn": (True, False),
    }


def test_blacklist_rows_are_judged_by_their_url(spark: SparkSession) -> None:
    """Every decision about a server or a domain holds, also one without a time."""
    rows = [refusal("https://a.example"), refusal("https://a.example", "11-11 00:00"), refusal("?"), refusal("*.")]
    rows += [refusal(rule) for rule in ("*.b.example", "*.c")]
    timeless = refusal("https://b.example") | {"created_at": None}
    good, bad = _outcome(check_blacklist(frame(spark, BLACKLIST, [*rows, timeless])), "server_url")
    assert good == ["*.b.example", "*.c", "https://a.example", "https://a.example", "https://b.example"]
    assert bad == [("*.", "malformed URL"), ("?", "malformed URL")]


def test_health_events_are_judged(spark: SparkSession) -> None:
    """Events without an id, a time, a server or a change tell nothing; one that is there twice tells it once."""
    twice = event("https://a.example", "unhealthy", "11-20 12:00", id=1, reason="twice")
    rows = [
        event("https://a.example", "healthy", "11-20 13:00", reason="good"),
        twice,
        twice,
        event("https://a.example", "healthy", "11-20 14:00", id=None, reason="no id"),
        event("https://a.example", "healthy", NOW + timedelta(days=2), reason="future"),
        event("a.example", "healthy", "11-20 14:00", reason="url"),
        event("https://a.example", "dead", "11-20 14:00", reason="state"),
        event("https://a.example", "healthy", "11-20 14:00", from_state=None, reason="from"),
        event("https://a.example", "healthy", "11-20 14:00", from_state="healthy", reason="same"),
    ]
    checked = check_health_events(frame(spark, HEALTH_EVENTS, rows), now=NOW)
    assert _outcome(checked, "reason") == (
        ["good", "twice"],
        [
            ("from", "unknown state"),
            ("future", "time in the future"),
            ("no id", "no id"),
            ("same", "no change of state"),
            ("state", "unknown state"),
            ("twice", "duplicated id"),
            ("url", "malformed URL"),
        ],
    )


def test_everything_checked_has_the_inputs_schema(spark: SparkSession) -> None:
    """What follows finds the columns it was written for."""
    results: list[tuple[DataFrame, object]] = [
        (check_servers(frame(spark, SERVERS), now=NOW).good, SERVERS),
        (check_health_events(frame(spark, HEALTH_EVENTS), now=NOW).good, HEALTH_EVENTS),
        (check_blacklist(frame(spark, BLACKLIST)).good, BLACKLIST),
    ]
    for good, schema in results:
        assert good.schema == schema
