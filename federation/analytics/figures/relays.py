"""Peers that a delivery could go through, the best first.

A candidate is healthy, not on the blacklist and not to be reviewed for it, and accepted direct deliveries in the last 7
days: what reached it through others says nothing about the way there. By definition:

- score = availability · latency · recency, each between 0 and 1;
- availability = (direct deliveries + 1) / (attempts not failed through our own fault or trouble + 2): one success out
  of one counts for less than 99 of 100. The column `availability` has the plain quotient;
- latency = 1 / (1 + p95 in seconds), with the p95 of a typical day;
- recency halves every 3 days since the last day on which the server accepted a delivery. That the registry has seen it
  since does not count: introducing itself costs a stranger nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import ServerHealth
from federation.analytics.days import WEEK, midnight, seconds_between, start_of
from federation.analytics.figures.own_trouble import with_excused
from federation.analytics.figures.scorecard import blamed, daily_in_windows, relayed, typical_p95
from federation.analytics.frames import RELAY_CANDIDATES, Action, Window

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

HALF_LIFE: Final = timedelta(days=3)


def relay_candidates(
    daily: DataFrame, scorecard: DataFrame, *, servers: DataFrame, trouble: DataFrame | None = None, window: Window
) -> DataFrame:
    """Compute one row per candidate, ranked from 1 by score, or by URL if scores are equal; see `RELAY_CANDIDATES`."""
    fit = (F.col("state") == ServerHealth.HEALTHY.value) & (F.col("action") != Action.REVIEW.value)
    trusted = scorecard.where((F.col("window_days") == WEEK) & fit).select("server_url", "state")
    seen = servers.select(F.col("url").alias("server_url"), F.col("last_seen").alias("registry_seen"))
    rows = (
        _direct(with_excused(daily, trouble), window)
        .join(trusted, "server_url")
        .join(seen, "server_url")
        .withColumns(
            {
                "as_of": F.lit(window.as_of),
                "availability": F.col("direct") / F.col("blamed"),
                "last_seen": F.greatest("registry_seen", start_of("last_day")),
            }
        )
        .withColumn("score", _score(window))
    )
    # All are in one state, so this is one partition; without a named one, Spark would warn. There are no more
    # candidates than servers.
    rank = F.row_number().over(Over.partitionBy("state").orderBy(F.desc("score"), "server_url"))
    return rows.withColumn("rank", rank).to(RELAY_CANDIDATES)


def _direct(daily: DataFrame, window: Window) -> DataFrame:
    rows = daily_in_windows(daily, window, [WEEK]).withColumns(
        {"direct": F.col("delivered") - relayed(), "blamed": blamed()}
    )
    return (
        rows.groupBy("server_url")
        .agg(
            F.sum("direct").alias("direct"),
            F.sum("blamed").alias("blamed"),
            F.max(F.when(F.col("direct") > 0, F.col("day"))).alias("last_day"),
            typical_p95().alias("p95_ms"),
        )
        .where(F.col("direct") > 0)
    )


def _score(window: Window) -> Column:
    availability = (F.col("direct") + 1) / (F.col("blamed") + 2)
    latency = 1000 / (1000 + F.col("p95_ms"))
    idle = F.greatest(seconds_between(start_of("last_day"), F.lit(midnight(window.until))), F.lit(0.0))
    return availability * latency * F.pow(F.lit(0.5), idle / HALF_LIFE.total_seconds())
