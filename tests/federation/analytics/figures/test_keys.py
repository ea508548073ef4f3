"""Which keys are suspicious."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession

from federation.analytics.figures.keys import KEY, key_anomalies
from federation.analytics.frames import ACCEPTED_KEYS, KEY_ANOMALIES, LINKS, SERVERS, Window
from federation.protocol.encodings import decode_base64_sized
from tests.federation.analytics.rows import WINDOW, at, columns, fingerprint, frame, key, server


def _url(name: str) -> str:
    return f"https://{name}.example"


BEFORE: Final = [
    server(_url("steady")),
    server(_url("rotated")),
    server(_url("one-changed")),
    server(_url("encryption-changed")),
    server(_url("replaced")),
    server(_url("returned")),
    server(_url("victim"), public_key=key("wanted")),
    server(_url("gone")),
    server(_url("mended"), public_key="nonsense"),
]
TODAY: Final = [
    server(_url("steady")),
    server(_url("rotated"), public_key=key("fresh 1"), encryption_public_key=key("fresh 2")),
    server(_url("one-changed"), public_key=key("fresh 3")),
    server(_url("encryption-changed"), encryption_public_key=key("fresh 4")),
    server(_url("replaced"), id="another", public_key=key("fresh 5"), encryption_public_key=key("fresh 6")),
    server(_url("returned"), id="another"),
    server(_url("victim"), public_key=key("fresh 7"), encryption_public_key=key("fresh 8")),
    server(_url("thief"), public_key=key("wanted")),
    server(_url("mended"), encryption_public_key=key("fresh 9")),
    server(_url("new")),
    server(_url("twin-1"), public_key=key("common")),
    server(_url("twin-2"), encryption_public_key=key("common")),
    server(_url("both"), public_key=key("one for both"), encryption_public_key=key("one for both")),
    server(_url("short"), public_key="AAAA"),
    server(_url("keyless"), encryption_public_key=None),
    server(_url("keyless-too"), encryption_public_key=None),
]


@pytest.fixture(scope="module")
def anomalies(spark: SparkSession) -> list[Row]:
    """What is found in today's registry, with the earlier one beside it."""
    result = key_anomalies(frame(spark, SERVERS, TODAY), earlier=frame(spark, SERVERS, BEFORE), window=WINDOW)
    assert columns(result.schema) == columns(KEY_ANOMALIES)
    return result.collect()


def about(anomalies: list[Row], name: str) -> list[tuple[str, str, str]]:
    return [(row["kind"], row["key_kind"], row["detail"]) for row in anomalies if _url(name) in row["server_urls"]]


def test_a_server_that_shows_another_key_is_told(spark: SparkSession) -> None:
    """By its link, since when and what to do; a link that is down says nothing of keys."""
    since = datetime(2026, 11, 2, 12, tzinfo=UTC)
    links = [
        {"server_url": _url("steady"), "wire": "sealed", "state": "mismatch", "since": since, "reason": None},
        {"server_url": _url("new"), "wire": "sealed", "state": "down", "since": since, "reason": "TIMEOUT"},
    ]
    result = key_anomalies(
        frame(spark, SERVERS, [server(_url("steady")), server(_url("new"))]),
        earlier=None,
        links=frame(spark, LINKS, links),
        window=WINDOW,
    )
    assert columns(result.schema) == columns(KEY_ANOMALIES)
    [row] = result.collect()
    told = "shows another signing key than the registered one since 2026-11-02: what is sent to it is held"
    assert (row["kind"], row["server_urls"], row["detail"]) == ("mismatched", [_url("steady")], told)
    assert row["fingerprint"] is not None


def test_a_change_stands_for_a_month(spark: SparkSession) -> None:
    """The registry is compared with that of the day before: only the night after the change sees it."""
    today = frame(spark, SERVERS, TODAY)
    first = key_anomalies(today, earlier=frame(spark, SERVERS, BEFORE), window=WINDOW)
    changes = [row for row in first.collect() if row["kind"] == "changed"]
    assert {row["found_on"] for row in changes} == {WINDOW.as_of}
    known = first
    for days in (1, 29):
        window = Window(since=WINDOW.since, until=WINDOW.until + timedelta(days=days))
        known = key_anomalies(today, earlier=today, window=window, known=known)
        again = known.collect()
        assert [row for row in again if row["kind"] == "changed" and row["found_on"] == WINDOW.as_of] != []
        assert sorted(row["detail"] for row in again) == sorted(row["detail"] for row in first.collect())
    window = Window(since=WINDOW.since, until=WINDOW.until + timedelta(days=30))
    over = key_anomalies(today, earlier=today, window=window, known=known).collect()
    assert {row["kind"] for row in over} == {"shared", "malformed"}


def test_a_change_that_is_found_twice_is_told_once(spark: SparkSession, tmp_path: Path) -> None:
    """Two runs of one day, or one that goes back: the same change, found first by the first of them.

    What a run found lies in a file, and a file does not promise that no URL in a list is null.
    """
    today, before = frame(spark, SERVERS, TODAY), frame(spark, SERVERS, BEFORE)
    key_anomalies(today, earlier=before, window=WINDOW).write.parquet(f"file://{tmp_path}/found")
    first = spark.read.schema(KEY_ANOMALIES).parquet(f"file://{tmp_path}/found")
    window = Window(since=WINDOW.since, until=WINDOW.until + timedelta(days=1))
    second = key_anomalies(today, earlier=before, window=window, known=first).collect()
    assert len(second) == first.count()
    assert {row["found_on"] for row in second if row["kind"] == "changed"} == {WINDOW.as_of}


def test_what_an_operator_has_accepted_is_told_no_more(spark: SparkSession) -> None:
    """A change by the key that its server has now; a shared key when all who share it are known to."""

    def accepted(*keys: tuple[str, str]) -> DataFrame:
        when = {"accepted_at": at("11-28 00:00")}
        rows = [{"server_url": _url(name), "fingerprint": fingerprint(key(secret)), **when} for name, secret in keys]
        return frame(spark, ACCEPTED_KEYS, rows)

    def left(*keys: tuple[str, str]) -> set[str]:
        found = key_anomalies(
            frame(spark, SERVERS, TODAY), earlier=frame(spark, SERVERS, BEFORE), window=WINDOW, accepted=accepted(*keys)
        )
        return {name for row in found.collect() for name in row["server_urls"]}

    assert {_url("one-changed"), _url("twin-1"), _url("thief"), _url("short")} <= left()
    assert _url("one-changed") not in left(("one-changed", "fresh 3"))
    assert _url("one-changed") in left(("one-changed", "fresh 4"), ("steady", "fresh 3"))
    assert _url("twin-1") in left(("twin-1", "common"))
    assert not {_url("twin-1"), _url("twin-2")} & left(("twin-1", "common"), ("twin-2", "common"))
    assert _url("thief") not in left(("thief", "wanted"))


@pytest.mark.parametrize("name", ["steady", "rotated", "mended", "returned", "gone", "new"])
def test_keys_in_order_are_not_mentioned(anomalies: list[Row], name: str) -> None:
    """Unchanged, rotated, also from a malformed key, registered again with the same keys, removed, new: all is well."""
    assert about(anomalies, name) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "one-changed": ("changed", "signing", "its signing key changed alone: a rotation changes both"),
        "encryption-changed": ("changed", "encryption", "its encryption key changed alone: a rotation changes both"),
        "replaced": (
            "changed",
            "signing and encryption",
            "its registry row was replaced by another with other keys: a rotation keeps the row",
        ),
        "victim": ("changed", "signing", f"a key of {_url('victim')} became the signing key of {_url('thief')}"),
        "both": ("shared", "signing and encryption", "one key serves for signing and for encryption"),
        "short": ("malformed", "signing", "its signing key is not the base64 of 32 bytes"),
        "keyless": ("malformed", "encryption", "its encryption key is not the base64 of 32 bytes"),
        "keyless-too": ("malformed", "encryption", "its encryption key is not the base64 of 32 bytes"),
    }.items(),
)
def test_an_anomaly_says_what_is_wrong(anomalies: list[Row], name: str, expected: tuple[str, str, str]) -> None:
    """One row, in words."""
    assert about(anomalies, name) == [expected]


def test_servers_that_share_a_key_are_listed_together(anomalies: list[Row]) -> None:
    """Also where one has it for signing, the other for encryption; the fingerprint is that of the key's bytes."""
    [row] = [row for row in anomalies if _url("twin-1") in row["server_urls"]]
    assert (row["kind"], row["key_kind"]) == ("shared", "signing and encryption")
    assert row["server_urls"] == [_url("twin-1"), _url("twin-2")]
    assert row["fingerprint"] == fingerprint(key("common"))
    assert row["as_of"] == WINDOW.as_of


def test_a_malformed_key_has_no_fingerprint(anomalies: list[Row]) -> None:
    """There are no bytes to take one of."""
    assert {row["fingerprint"] for row in anomalies if row["kind"] == "malformed"} == {None}


def test_without_an_earlier_registry_nothing_has_changed(spark: SparkSession) -> None:
    """The first run cannot know."""
    rows = key_anomalies(frame(spark, SERVERS, TODAY), earlier=None, window=WINDOW).collect()
    assert {row["kind"] for row in rows} == {"shared", "malformed"}


@given(
    text=st.binary(min_size=28, max_size=36).map(lambda raw: base64.b64encode(raw).decode())
    | st.from_regex(r"[A-Za-z0-9+/]{42}.=", fullmatch=True)
    | st.text()
)
def test_the_pattern_of_keys_is_that_of_the_protocol(text: str) -> None:
    """What Spark takes for a key is what the protocol decodes to 32 bytes."""
    try:
        decode_base64_sized(text, 32)
        sound = True
    except ValueError:
        sound = False
    assert bool(re.fullmatch(KEY, text)) == sound
