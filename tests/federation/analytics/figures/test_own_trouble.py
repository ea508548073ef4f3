"""When it was us: told by all servers together, and nobody's outage."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, StringType, StructField, StructType, TimestampType

from federation.analytics.days import instant
from federation.analytics.figures.own_trouble import own_trouble, with_excused, without_own
from federation.analytics.frames import SERVER_DAILY
from tests.federation.analytics.rows import WINDOW, Values, at, daily, days, frame

UNTIL: Final = at("12-01 00:00")
OUTAGES: Final = StructType(
    [
        StructField("server_url", StringType()),
        StructField("began_at", TimestampType()),
        StructField("ended_at", TimestampType()),
        StructField("is_excused", BooleanType()),
    ]
)
SIGNS: Final = StructType([StructField("at", TimestampType())])
Spells = list[tuple[str, str]]


def outage(name: object, began: str | None, ended: str | None) -> Values:
    return {
        "server_url": f"https://{name}.example",
        "began_at": began and at(began),
        "ended_at": ended and at(ended),
        "is_excused": False,
    }


def attempted(which: Iterable[str], servers: int = 4) -> list[Values]:
    return [daily(f"https://{number}.example", day, delivered=1) for day in which for number in range(servers)]


def spells(found: DataFrame) -> Spells:
    rows = found.selectExpr("unix_micros(began_at) AS began_at", "unix_micros(ended_at) AS ended_at").collect()
    return sorted((f"{instant(row.began_at):%m-%d %H:%M}", f"{instant(row.ended_at):%m-%d %H:%M}") for row in rows)


ALL_DAYS: Final = days("11-01", "11-30")
TOGETHER: Final = [outage(n, f"11-10 07:5{n}", f"11-10 08:1{n}") for n in range(3)]


@pytest.mark.parametrize(
    ("outages", "attempts", "signs", "expected"),
    [
        # Across a full hour; over when the second of three is back.
        (TOGETHER, attempted(ALL_DAYS), [], [("11-10 07:50", "11-10 08:11")]),
        (TOGETHER[:2], attempted(ALL_DAYS), [], []),
        (TOGETHER, attempted(ALL_DAYS, servers=6), [], []),
        # They stay away, and others are reached on the next day with attempts.
        ([outage(n, "11-10 07:50", None) for n in range(3)], attempted(ALL_DAYS), [], [("11-10 07:50", "11-11 00:00")]),
        # Nothing for two days, where there always is something; and where there seldom is.
        ([], attempted([*days("11-01", "11-09"), *days("11-12", "11-30")]), [], [("11-09 23:59", "11-12 00:00")]),
        ([], attempted([*days("11-01", "11-09"), *days("11-11", "11-30")]), [], []),
        ([], attempted(("11-01", "11-05", "11-09", "11-14", "11-20", "11-25", "11-30")), [], []),
        # A week, but for what was seen in it; and since before the window.
        ([], attempted(("11-01", "11-05", "11-13", "11-20", "11-25")), ["11-07 12:00"], []),
        ([], attempted(("11-01", "11-05", "11-13", "11-20", "11-25")), [], [("11-05 23:59", "11-13 00:00")]),
        ([], attempted(("11-25", "11-30")), ["10-20 12:00"], [("10-20 12:00", "11-25 00:00")]),
        # Two spells that meet are one.
        (
            [outage(n, f"11-09 22:0{n}", None) for n in range(3)],
            attempted([*days("11-01", "11-09"), *days("11-12", "11-30")]),
            [],
            [("11-09 22:00", "11-12 00:00")],
        ),
    ],
)
def test_spells_are_told_by_all_servers_together(
    spark: SparkSession, outages: list[Values], attempts: list[Values], signs: list[str], expected: Spells
) -> None:
    """Most of those that were tried went down at once, or there was no sign of this node at all."""
    found = own_trouble(
        frame(spark, OUTAGES, outages),
        frame(spark, SERVER_DAILY, attempts),
        frame(spark, SIGNS, [{"at": at(moment)} for moment in signs]),
        window=WINDOW,
        until=UNTIL,
    )
    assert spells(found) == expected


def test_an_outage_is_as_long_as_what_is_left_of_it(spark: SparkSession) -> None:
    """Over within an hour after, it is none; one that goes on is excused as long as nothing else tells of it."""
    trouble = [{"began_at": at("11-10 12:00"), "ended_at": at("11-10 13:00")}]
    outages = [
        outage("ours", "11-10 12:00", "11-10 13:40"),
        outage("longer", "11-10 12:00", "11-10 15:00"),
        outage("before", "11-09 12:00", "11-11 12:00"),
        outage("another", "11-10 13:01", "11-10 13:20"),
        outage("unrecorded", None, "11-10 12:30"),
        outage("goes-on", "11-10 12:00", None),
    ]
    spell = StructType(OUTAGES.fields[1:3])
    left = without_own(frame(spark, OUTAGES, outages), frame(spark, spell, trouble), until=at("11-10 13:30"))
    told = {row["server_url"][8:-8]: (row["began_at"], row["is_excused"]) for row in left.collect()}
    assert told == {
        "longer": (naive("11-10 13:00"), False),
        "before": (naive("11-09 13:00"), False),
        "another": (naive("11-10 13:01"), False),
        "unrecorded": (None, False),
        "goes-on": (naive("11-10 13:00"), True),
    }


def test_what_failed_in_these_hours_is_told_by_day(spark: SparkSession) -> None:
    """Of each hour that a spell has a part in, also where days before have no record of hours."""
    trouble = [
        {"began_at": at("11-10 22:59"), "ended_at": at("11-11 01:00")},
        {"began_at": at("11-12 05:00"), "ended_at": at("11-12 05:01")},
    ]
    hours = {"11-10": {21: 1, 22: 2, 23: 4}, "11-11": {0: 8, 1: 16}, "11-12": None, "11-13": {5: 32}}
    rows = [daily("https://a.example", day, delivered=1, failed_hours=failed) for day, failed in hours.items()]
    spell = StructType(OUTAGES.fields[1:3])
    found = with_excused(frame(spark, SERVER_DAILY, rows), frame(spark, spell, trouble)).collect()
    assert {f"{row['day']:%m-%d}": row["excused"] for row in found} == {"11-10": 6, "11-11": 8, "11-12": 0, "11-13": 0}


def naive(moment: str) -> datetime:
    return at(moment).replace(tzinfo=None)
