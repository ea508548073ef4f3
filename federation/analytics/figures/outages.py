"""Outages: what the events of a server's health say about when it was down.

A server's events are taken in the order of their ids: they are written one at a time per server, so ids give the right
order even if a clock was set back. An outage begins with the first event to `unhealthy` and ends with the next one to
`healthy`; repeats change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import ServerHealth
from federation.analytics.days import microseconds_between, seconds_between
from federation.analytics.frames import as_it_is

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame

    from federation.analytics.frames import Keep


def find_outages(events: DataFrame, servers: DataFrame, *, until: datetime, keep: Keep = as_it_is) -> DataFrame:
    """Find every outage of a known server that began before `until`.

    The columns: `server_url`; `began_at`, null if that is not on record; `ended_at`, null if it was not over at
    `until`; `is_excused`, false before `own_trouble` has judged it. None ends before it began.

    The registry has the last word. If it knows a server to be healthy, an outage that the events leave open ended when
    the server was last seen. If it knows one to be down and no event says so, it has been down since it was last seen
    or, by the events, got well, or since it is known: when it was last looked at says nothing. Events after `until`
    matter only for this. What the events alone say goes through `keep`.
    """
    recorded = keep(_recorded(events), by_server=True)
    marked_at = F.coalesce("last_seen", "created_at").alias("marked_at")
    known = servers.select(F.col("url").alias("server_url"), "is_healthy", "last_seen", marked_at)
    # When it was seen may not be known: then it is not known either how long the outage was.
    ended = F.coalesce("ended_at", F.when(F.col("is_healthy"), F.coalesce("last_seen", "began_at")))
    of_known = recorded.join(known, "server_url").select(
        "server_url",
        "began_at",
        # `greatest` ignores nulls, but an outage without an end must stay without one.
        F.when(ended.isNotNull(), F.greatest(ended, F.col("began_at"))).alias("ended_at"),
    )
    last_ends = recorded.groupBy("server_url").agg(F.max("ended_at").alias("last_end"))
    unrecorded = (
        known.where(~F.col("is_healthy"))
        .join(recorded.where(F.col("ended_at").isNull()), "server_url", "left_anti")
        .join(last_ends, "server_url", "left")
        .select(
            "server_url",
            F.greatest("marked_at", "last_end").alias("began_at"),
            F.lit(None).cast("timestamp").alias("ended_at"),
        )
    )
    begun = of_known.unionByName(unrecorded).where(F.col("began_at").isNull() | (F.col("began_at") < F.lit(until)))
    ended_at = F.when(F.col("ended_at") < F.lit(until), F.col("ended_at"))
    return begun.withColumns({"ended_at": ended_at, "is_excused": F.lit(False)})


def _recorded(events: DataFrame) -> DataFrame:
    """Return the outages according to the events alone, one per change to `unhealthy`."""
    in_order = Over.partitionBy("server_url").orderBy("id")
    state_before = F.coalesce(F.lag("to_state").over(in_order), F.col("from_state"))
    first = F.row_number().over(in_order) == 1
    changes = (
        events.withColumn("_before", state_before)
        .withColumn("_first", first)
        .where(F.col("to_state") != F.col("_before"))
    )
    following = F.lead("at").over(in_order)
    down = F.col("to_state") == ServerHealth.UNHEALTHY.value
    # A record that begins with a recovery implies an outage before it.
    spans = changes.select(
        "server_url",
        F.when(down, F.struct(F.col("at").alias("began_at"), following.alias("ended_at")))
        .when(F.col("_first"), F.struct(F.lit(None).cast("timestamp").alias("began_at"), F.col("at").alias("ended_at")))
        .alias("_outage"),
    )
    return spans.where(F.col("_outage").isNotNull()).select("server_url", "_outage.*")


def outage_figures(windows: DataFrame, outages: DataFrame) -> DataFrame:
    """Compute the figures of each server's outages per window.

    `windows` has `server_url`, `window_days`, `begins_at`, `ends_at`.

    - `failures`: outages that began in the window.
    - `mttf_s`, mean time to failure: time up in the window / failures; null without a failure.
    - `mttr_s`, mean time to repair: mean length of the outages that ended in the window, from where they began, even
      before the window; null without one. An outage whose beginning is not on record has no length and is left out.
    - `longest_outage_s`: of the outages that touch the window, from where it began to where it ended or, at most, to
      the window's end; one that began unrecorded counts from the window's begin. 0 without an outage.
    - `uptime`: the share of the window in which the server was up; null for a window without length.
    """
    began = F.coalesce("began_at", "begins_at")
    ended = F.coalesce("ended_at", "ends_at")
    began_inside = F.col("began_at") >= F.col("begins_at")
    ended_inside = F.col("ended_at") >= F.col("begins_at")
    # Sums of whole microseconds are exact, in whatever order they are added.
    down = microseconds_between(F.greatest(began, F.col("begins_at")), ended)
    repair = F.when(ended_inside, microseconds_between(F.col("began_at"), F.col("ended_at")))
    touches = (began < F.col("ends_at")) & (ended >= F.col("begins_at"))
    key = ["server_url", "window_days", "begins_at", "ends_at"]
    sums = (
        windows.join(outages.where(~F.col("is_excused")), "server_url")
        .where(touches)
        .groupBy(*key)
        .agg(
            F.count_if(began_inside).cast("int").alias("failures"),
            (F.sum(down) / 1_000_000).alias("down_s"),
            (F.avg(repair) / 1_000_000).alias("mttr_s"),
            F.max(seconds_between(began, ended)).alias("longest_outage_s"),
        )
    )
    length = seconds_between(F.col("begins_at"), F.col("ends_at"))
    up = F.greatest(length - F.coalesce("down_s", F.lit(0.0)), F.lit(0.0))
    return windows.join(sums, key, "left").select(
        "server_url",
        "window_days",
        F.coalesce("failures", F.lit(0)).alias("failures"),
        F.when(F.col("failures") > 0, up / F.col("failures")).alias("mttf_s"),
        "mttr_s",
        F.coalesce("longest_outage_s", F.lit(0.0)).alias("longest_outage_s"),
        F.when(length > 0, up / length).alias("uptime"),
    )
