"""Our own trouble: when this node was cut off, or did nothing, by what is on record of all servers together.

- together: within an hour at least 3 servers went down, and more than half of those tried on that day. It lasts until
  half of them are back or, if they stay away, until the first day after on which anything was delivered again: then it
  is they who are gone.
- silent: days without any sign of this node: no attempt, no change of a server's health, nothing seen, owed or lost.
  That is a week, or two days where nine in ten of the others have a sign: on a quiet node little happens anyway.

Such times are nobody's outage. An outage is as long as what is left of it, and what was over within an hour after is
none. What failed in an hour of such a time is nobody's fault, unless it is proof that somebody posed as the server.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics.days import DAY, MONTH, start_of, utc_day

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import Column, DataFrame

    from federation.analytics.frames import Window

FEWEST_TOGETHER: Final = 3
MOST: Final = 0.5
SILENT_DAYS: Final = 7
SILENT_AMONG_BUSY_DAYS: Final = 2
BUSY: Final = 0.9
AFTERMATH: Final = timedelta(hours=1)
"""How long it may take until every server has been looked at again."""

_SLOT_S: Final = 3_600
_SLOT_US: Final = _SLOT_S * 1_000_000
_DAY_S: Final = int(DAY.total_seconds())
_NEVER: Final = 2**62


def own_trouble(
    outages: DataFrame, daily: DataFrame, signs: DataFrame, *, window: Window, until: datetime
) -> DataFrame:
    """Find the spells of our own trouble before `until`, each `began_at` and `ended_at`; none overlaps another.

    `signs` has the times, `at`, of what this node did beside the attempts of `daily`.
    """
    spells = _together(outages, _tried(daily), until).unionByName(_silent(daily, signs, window, until))
    by_begin = Over.partitionBy(_all()).orderBy("began_at", "ended_at")
    before = F.max("ended_at").over(by_begin.rowsBetween(Over.unboundedPreceding, -1))
    is_new = F.when(F.col("began_at") <= before, 0).otherwise(1)
    merged = spells.withColumn("_new", is_new).withColumn("_spell", F.sum("_new").over(by_begin))
    return (
        merged.groupBy("_spell")
        .agg(F.min("began_at").alias("began_at"), F.max("ended_at").alias("ended_at"))
        .drop("_spell")
    )


def without_own(outages: DataFrame, trouble: DataFrame, *, until: datetime) -> DataFrame:
    """Return `outages` without what was our own trouble.

    One that goes on, and that nothing else tells of, `is_excused`: nobody has looked since.
    """
    ends = F.coalesce("ended_at", F.lit(until))
    spells = trouble.agg(
        (F.count("*") >= 0).alias("_all"), F.collect_list(F.struct("began_at", "ended_at")).alias("_spells")
    )

    def shared(total: Column, spell: Column) -> Column:
        begin, end = F.greatest("began_at", spell["began_at"]), F.least(ends, spell["ended_at"])
        return total + F.greatest(F.unix_micros(end) - F.unix_micros(begin), F.lit(0))

    ours = F.aggregate("_spells", F.lit(0).cast("long"), shared)
    left = F.unix_micros(ends) - F.unix_micros("began_at") - F.col("_ours")
    is_ours = F.coalesce((F.col("_ours") > 0) & (left <= AFTERMATH / timedelta(microseconds=1)), F.lit(False))
    rows = outages.withColumn("_all", F.col("server_url").isNotNull()).join(F.broadcast(spells), "_all")
    judged = rows.withColumn("_ours", ours).withColumn("is_excused", is_ours)
    return judged.where(~F.col("is_excused") | F.col("ended_at").isNull()).select(
        "server_url",
        F.timestamp_micros(F.unix_micros("began_at") + F.col("_ours")).alias("began_at"),
        "ended_at",
        "is_excused",
    )


def with_excused(daily: DataFrame, trouble: DataFrame | None) -> DataFrame:
    """Add to each row of `daily` how many of its attempts failed in hours of our own trouble: `excused`."""
    if trouble is None:
        return daily.withColumn("excused", F.lit(0))
    numbers = (F.floor(F.unix_micros(F.col(name)) / _SLOT_US) for name in ("began_at", "last"))
    last = F.timestamp_micros(F.unix_micros("ended_at") - 1)
    spells = trouble.where(F.col("began_at") < F.col("ended_at")).withColumn("last", last)
    hours = spells.select(F.explode(F.sequence(*numbers)).alias("number")).select(
        utc_day(F.timestamp_seconds(F.col("number") * _SLOT_S)).alias("day"),
        F.pmod("number", F.lit(24)).cast("int").alias("hour"),
    )
    ours = hours.groupBy("day").agg(F.collect_set("hour").alias("_hours"))
    failed = F.map_values(F.map_filter("failed_hours", lambda hour, _: F.array_contains("_hours", hour)))
    excused = F.aggregate(failed, F.lit(0).cast("long"), lambda total, rows: total + rows)
    rows = daily.join(F.broadcast(ours), "day", "left")
    return rows.withColumn("excused", F.coalesce(excused, F.lit(0))).drop("_hours")


def _all() -> Column:
    """Return what is true in each row: a key, so that Spark neither warns nor joins by pairs."""
    return F.col("began_at").isNotNull()


def _tried(daily: DataFrame) -> DataFrame:
    """Return, per day, how many servers were tried, and the first day after on which anything was delivered."""
    days = daily.where(F.col("attempts") > 0).groupBy("day")
    counted = days.agg(F.count("*").alias("tried"), (F.sum("delivered") > 0).alias("took"))
    later = Over.partitionBy(F.col("tried") > 0).orderBy("day").rowsBetween(1, Over.unboundedFollowing)
    return counted.select("day", "tried", F.min(F.when(F.col("took"), F.col("day"))).over(later).alias("took_next"))


def _together(outages: DataFrame, tried: DataFrame, until: datetime) -> DataFrame:
    # Those that an hour's end parts meet in the hours that begin at half past.
    shift = F.explode(F.array(F.lit(0), F.lit(_SLOT_S // 2)))
    begun = outages.where(F.col("began_at").isNotNull()).withColumn("_shift", shift)
    slot = F.floor((F.unix_seconds("began_at") + F.col("_shift")) / _SLOT_S)
    ended = F.coalesce(F.unix_micros("ended_at"), F.lit(_NEVER))
    cohorts = begun.groupBy("_shift", slot.alias("_slot")).agg(
        F.count_distinct("server_url").alias("servers"),
        F.min("began_at").alias("began_at"),
        F.percentile(ended, 0.5).cast("long").alias("_back"),
    )
    met = cohorts.where(F.col("servers") >= FEWEST_TOGETHER).withColumn("day", utc_day("began_at"))
    most = met.join(F.broadcast(tried), "day").where(F.col("servers") > MOST * F.col("tried"))
    taken = F.unix_micros(start_of("took_next"))
    return most.select("began_at", F.least(F.timestamp_micros(F.least("_back", taken)), F.lit(until)).alias("ended_at"))


def _silent(daily: DataFrame, signs: DataFrame, window: Window, until: datetime) -> DataFrame:
    ends = F.explode(F.array(start_of("day"), F.timestamp_seconds(F.unix_seconds(start_of("day")) + _DAY_S - 1)))
    attempted = daily.select(ends.alias("at"), F.lit(True).alias("is_attempt"))
    moments = signs.select("at", F.lit(False).alias("is_attempt")).unionByName(attempted)
    days = moments.where(F.col("at") <= F.lit(until)).groupBy(utc_day("at").alias("day"))
    rows = days.agg(
        F.min("at").alias("first"),
        F.max("at").alias("last"),
        F.min(F.when(F.col("is_attempt"), utc_day("at"))).alias("attempted"),
    )
    all_ = Over.partitionBy(F.col("day").isNotNull())
    # Of days before those that were computed nobody knows whether there were attempts.
    computed = F.least(F.lit(window.since), F.min("attempted").over(all_))
    since = F.greatest(computed, F.lit(window.until - MONTH * DAY))
    following = F.coalesce(F.lead("first").over(all_.orderBy("day")), F.lit(until))
    silent = F.datediff(utc_day(following), F.greatest(F.col("day"), F.date_sub(since, 1))) - 1
    told = rows.select(
        F.col("last").alias("began_at"),
        following.alias("ended_at"),
        silent.alias("silent"),
        F.count_if(F.col("day") >= since).over(all_).alias("told"),
        (F.datediff(utc_day(F.lit(until)), F.greatest(since, F.min("day").over(all_))) - silent).alias("others"),
    )
    among_busy = (F.col("others") >= SILENT_DAYS) & (F.col("told") >= BUSY * F.col("others"))
    is_silent = F.col("silent") >= F.when(among_busy, SILENT_AMONG_BUSY_DAYS).otherwise(SILENT_DAYS)
    return told.where(is_silent).select("began_at", "ended_at")
