"""The network day by day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics.days import DAY, start_of, utc_day
from federation.analytics.figures.daily import share
from federation.analytics.figures.tally import percentile, ranked
from federation.analytics.frames import NETWORK_SUMMARY, Window

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TOP: Final = 10

_COUNTS: Final = ("servers_known", "servers_new", "servers_lost", "attempts", "delivered")


def network_summary(
    counts: DataFrame,
    daily: DataFrame,
    *,
    servers: DataFrame,
    outages: DataFrame,
    trouble: DataFrame,
    lost: DataFrame,
    window: Window,
) -> DataFrame:
    """Compute one row per UTC day of the window, even for days without attempts; see `NETWORK_SUMMARY`.

    At a day's end:

    - known: in the registry (it keeps no trace of servers that were removed); new: since that day;
    - healthy: known and not down; lost: went down that day and were still down at its end.

    Over a day: success rate = delivered / attempts; the share of attempts that went to the 10 servers with the most;
    p50 and p95 of all deliveries, from the counts of good attempts (see `tally`), and null for a day that only `daily`
    has; deliveries lost for good; the hours of our own trouble.
    """
    inside = daily.where(F.col("day").between(F.lit(window.since), F.lit(window.as_of)))
    parts = (
        _known(servers, window),
        _down(outages, window),
        _traffic(inside),
        _error_mix(inside),
        _latency(counts),
        lost.groupBy(utc_day("lost_at").alias("day")).agg(F.count("*").alias("lost")),
        _own_trouble(trouble, window),
    )
    rows = _days(window, counts.sparkSession)
    for part in parts:
        rows = rows.join(part, "day", "left")
    return rows.select(
        "day",
        *(_count(name).alias(name) for name in _COUNTS),
        F.greatest(_count("servers_known") - _count("servers_down"), F.lit(0)).alias("servers_healthy"),
        share("delivered", "attempts").alias("success_rate"),
        share("top_attempts", "attempts").alias("top10_share"),
        F.coalesce("errors", F.create_map().cast(NETWORK_SUMMARY["errors"].dataType)).alias("errors"),
        "p50_ms",
        "p95_ms",
        _count("lost").alias("lost"),
        F.coalesce("own_trouble", F.array().cast(NETWORK_SUMMARY["own_trouble"].dataType)).alias("own_trouble"),
    ).to(NETWORK_SUMMARY)


def _count(name: str) -> Column:
    return F.coalesce(name, F.lit(0))


def _days(window: Window, session: SparkSession) -> DataFrame:
    number = (window.until - window.since).days
    return session.range(number).select(F.date_add(F.lit(window.since), F.col("id").cast("int")).alias("day"))


def _each_day(begin: Column, end: Column) -> Column:
    """Return every day from `begin` to `end`, and no row if there is none. `sequence` alone would count backwards."""
    return F.explode(F.when(begin <= end, F.sequence(begin, end)))


def _known(servers: DataFrame, window: Window) -> DataFrame:
    since = utc_day("created_at")
    days = servers.select(
        since.alias("since"), _each_day(F.greatest(since, F.lit(window.since)), F.lit(window.as_of)).alias("day")
    )
    return days.groupBy("day").agg(
        F.count("*").alias("servers_known"), F.count_if(F.col("day") == F.col("since")).alias("servers_new")
    )


def _down(outages: DataFrame, window: Window) -> DataFrame:
    """Count the servers that were down at the end of each day."""
    began = utc_day("began_at")
    first = F.greatest(F.coalesce(began, F.lit(window.since)), F.lit(window.since))
    last = F.coalesce(F.least(F.date_sub(utc_day("ended_at"), 1), F.lit(window.as_of)), F.lit(window.as_of))
    days = outages.select("server_url", began.alias("began_on"), _each_day(first, last).alias("day"))
    lost = F.when(F.col("day") == F.col("began_on"), F.col("server_url"))
    return days.groupBy("day").agg(
        F.count_distinct("server_url").alias("servers_down"), F.count_distinct(lost).alias("servers_lost")
    )


def _own_trouble(trouble: DataFrame, window: Window) -> DataFrame:
    """Return each day's hours of our own trouble, as `07:30 to 07:52`."""
    last = utc_day(F.timestamp_micros(F.unix_micros("ended_at") - 1))
    first = F.greatest(utc_day("began_at"), F.lit(window.since))
    days = trouble.select("*", _each_day(first, F.least(last, F.lit(window.as_of))).alias("day"))
    begin = F.greatest(F.unix_seconds("began_at") - F.unix_seconds(start_of("day")), F.lit(0))
    end = F.least(F.unix_seconds("ended_at") - F.unix_seconds(start_of("day")), F.lit(int(DAY.total_seconds())))
    hours = F.concat(_clock(begin), F.lit(" to "), _clock(end))
    return days.groupBy("day").agg(F.sort_array(F.collect_list(hours)).alias("own_trouble"))


def _clock(seconds: Column) -> Column:
    minutes = F.floor(seconds / 60)
    return F.format_string("%02d:%02d", F.floor(minutes / 60), F.pmod(minutes, F.lit(60)))


def _traffic(daily: DataFrame) -> DataFrame:
    totals = daily.groupBy("day").agg(F.sum("attempts").alias("attempts"), F.sum("delivered").alias("delivered"))
    place = F.row_number().over(Over.partitionBy("day").orderBy(F.desc("attempts"), "server_url"))
    busiest = daily.select("day", "attempts", place.alias("place")).where(F.col("place") <= TOP)
    return totals.join(busiest.groupBy("day").agg(F.sum("attempts").alias("top_attempts")), "day")


def _error_mix(daily: DataFrame) -> DataFrame:
    counts = daily.select("day", F.explode("errors").alias("code", "rows"))
    by_code = counts.groupBy("day", "code").agg(F.coalesce(F.sum("rows"), F.lit(0)).alias("rows"))
    return by_code.groupBy("day").agg(F.map_from_entries(F.collect_list(F.struct("code", "rows"))).alias("errors"))


def _latency(counts: DataFrame) -> DataFrame:
    timed = counts.where(F.col("took_ms").isNotNull())
    by_time = timed.groupBy("day", "took_ms").agg(F.sum("rows").alias("rows"))
    latency = ranked(by_time, "day").agg(percentile(50).alias("p50_ms"), percentile(95).alias("p95_ms"))
    return latency.drop("_hash")
