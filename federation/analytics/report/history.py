"""What is different from earlier results: the advice of the day before, and who came and went within the month."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from federation.analytics.data.results import SERVER_SCORECARD, is_stored, read_dated, read_days
from federation.analytics.days import MONTH, WEEK
from federation.analytics.frames import UNREGISTERED, Action
from federation.analytics.report.findings import MOST_CHANGES, AdviceChange, Appearance, Changes, Turnover
from federation.analytics.report.verdicts import URGENCY, first_of, verdicts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date

    from pyspark.sql import DataFrame, Row, SparkSession

    from federation.analytics.data.snapshots import Place


def changes(spark: SparkSession, out: Place, as_of: date, found: DataFrame) -> Changes:
    """Compare the verdicts `found` with those of the results before, if there are any within a week."""
    earlier = [day for day in _stored(out, as_of) if (as_of - day).days <= WEEK]
    if not earlier:
        return Changes()
    before = verdicts(read_dated(spark, out, SERVER_SCORECARD, earlier[-1])).select(
        "server_url", sf.col("urgency").alias("before"), sf.col("owed").alias("owed_before")
    )
    [totals] = before.agg(
        sf.count_if(sf.col("before") > 1).alias("urgent"), sf.coalesce(sf.sum("owed_before"), sf.lit(0)).alias("owed")
    ).collect()
    changed = found.join(before, "server_url").where(sf.col("urgency") != sf.col("before"))
    is_worse = sf.col("urgency") > sf.col("before")
    order = [sf.desc(sf.greatest("urgency", "before")), sf.desc_nulls_last("week.attempts"), sf.col("server_url")]
    rows = first_of(changed, is_worse, order, MOST_CHANGES)
    worse, better = ([row for row in rows if (row["urgency"] > row["before"]) is way] for way in (True, False))
    return Changes(
        since=earlier[-1],
        urgent_before=totals["urgent"],
        owed_before=totals["owed"],
        worse=tuple(map(_advice, worse)),
        worse_count=_number(worse),
        better=tuple(map(_advice, better)),
        better_count=_number(better),
    )


def turnover(spark: SparkSession, out: Place, as_of: date) -> Turnover:
    """Find who was not in the registry in the earliest results of 30 days and is now, and the other way round."""
    days = [*_stored(out, as_of), as_of]
    if len(days) == 1:
        return Turnover()
    columns = ("server_url", "as_of", "window_days", "state", "action")
    cards = read_days(spark, out, SERVER_SCORECARD, days, columns)
    registered = cards.where((sf.col("window_days") == WEEK) & (sf.col("state") != UNREGISTERED))
    position = sf.array_position(sf.array(*(sf.lit(action.value) for action in URGENCY)), sf.col("action"))
    seen = registered.groupBy("server_url").agg(
        sf.min("as_of").alias("first"), sf.max("as_of").alias("last"), sf.max_by(position, "as_of").alias("urgency")
    )
    is_gone, is_new = sf.col("last") < sf.lit(as_of), sf.col("first") > sf.lit(days[0])
    moved = seen.where(is_gone | is_new).withColumn("day", sf.when(is_gone, sf.col("last")).otherwise(sf.col("first")))
    rows = first_of(moved, is_gone, [sf.desc("day"), sf.col("server_url")], MOST_CHANGES)
    vanished, arrived = ([row for row in rows if (row["last"] < as_of) is way] for way in (True, False))
    return Turnover(
        since=days[0],
        arrived=tuple(map(_appearance, arrived)),
        arrived_count=_number(arrived),
        vanished=tuple(map(_appearance, vanished)),
        vanished_count=_number(vanished),
    )


def _number(rows: Sequence[Row]) -> int:
    return rows[0]["number"] if rows else 0


def _stored(out: Place, as_of: date) -> list[date]:
    """Return the days of the month before `as_of` of which there are scorecards, the oldest first."""
    before = (as_of - timedelta(days=number) for number in range(MONTH - 1, 0, -1))
    return [day for day in before if is_stored(out, SERVER_SCORECARD, day)]


def _advice(row: Row) -> AdviceChange:
    return AdviceChange(
        url=row["server_url"],
        before=_action(row["before"]),
        now=_action(row["urgency"]),
        reason=row["reasons"][0] if row["reasons"] else None,
    )


def _appearance(row: Row) -> Appearance:
    return Appearance(url=row["server_url"], day=row["day"], action=_action(row["urgency"]))


def _action(place: int) -> Action:
    return URGENCY[max(place, 1) - 1]
