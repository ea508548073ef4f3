"""Scorecards: every known server over the last 7 and the last 30 days, from its daily rows and its outages.

By definition, over the days of a window, with `blamed` for the attempts whose failure is not our own (see
`OWN_FAULTS`):

- reliability = delivered / blamed attempts;
- latency = 1 up to a p95 of 1 s, falling in proportion to 0 at 15 s, which is a delivery's deadline;
- score = 100 · (0.6 · reliability + 0.3 · uptime + 0.1 · latency). What is unknown (no attempts, nothing delivered) is
  left out and the other weights grow in proportion;
- p95 = the median of the daily p95s, each weighted by that day's deliveries: that of a typical day, which one bad day
  does not change. Percentiles of days cannot be merged into that of the window;
- trend = reliability of the window's later half (the last 3 of 7 days, the last 15 of 30) minus that of the days
  before; less than 5 points up or down is stable, and fewer than 10 blamed attempts on either side say nothing.

`availability` is delivered / attempts, our own faults included, as in the daily rows, times the share of the window in
which the server was up: while it is down deliveries are held and burn no attempts, and it is not to look better for it.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import DEFAULT_WIRE, DeliveryState, ServerHealth
from federation.analytics.days import DAY, MONTH, WEEK, midnight
from federation.analytics.figures.actions import advise
from federation.analytics.figures.daily import share
from federation.analytics.figures.outages import outage_figures
from federation.analytics.frames import (
    BLACKLISTED,
    SERVER_SCORECARD,
    UNREGISTERED,
    AnomalyKind,
    Trend,
    Window,
    as_it_is,
)
from federation.codes import FORGERIES, OWN_FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from pyspark.sql import Column

    from federation.analytics.frames import Keep

WINDOW_DAYS: Final = (WEEK, MONTH)
WEIGHTS: Final = {"reliability": 0.6, "uptime": 0.3, "latency": 0.1}
FAST_MS: Final = 1_000
SLOWEST_MS: Final = 15_000
TREND_THRESHOLD: Final = 0.05
TREND_ATTEMPTS: Final = 10

_COUNTS: Final = ("attempts", "delivered", "blamed", "forged", "slow")


def server_scorecard(
    daily: DataFrame,
    *,
    servers: DataFrame,
    blacklist: DataFrame,
    outages: DataFrame,
    anomalies: DataFrame,
    deliveries: DataFrame,
    losses: DataFrame,
    links: DataFrame | None = None,
    window: Window,
    until: datetime,
    keep: Keep = as_it_is,
) -> DataFrame:
    """Compute one row per `WINDOW_DAYS` for each server known before `until`, or attempted; see `SERVER_SCORECARD`.

    `daily` holds every day of the longest window, stored or fresh; days without a row are days without attempts.
    `until` is when the window ends, or the present if that is earlier. Who is known, and what is known of each, goes
    through `keep`: of plans as long as these, every step would take Spark long to look through.
    """
    in_windows = daily_in_windows(daily, window)
    known = keep(_judged(servers, [in_windows, deliveries, losses], until=until), by_server=True)
    windows = known.select("server_url", "created_at", _each_of(WINDOW_DAYS).alias("window_days")).select(
        "server_url",
        "window_days",
        F.greatest("created_at", _window_begin("window_days", window)).alias("begins_at"),
        F.lit(until).alias("ends_at"),
    )
    key = ["server_url", "window_days"]
    joined = (
        outage_figures(windows, outages)
        .join(_traffic(in_windows), key, "left")
        .join(_top_errors(in_windows), key, "left")
        .join(_owed_figures(windows, deliveries, losses), key, "left")
        .join(_standing(known, blacklist, outages), "server_url")
        .join(_without_registry(links, known), "server_url", "left")
        .join(_key_findings(anomalies), "server_url", "left")
    )
    figures = (
        keep(joined, by_server=True)
        .withColumns({name: F.coalesce(name, F.lit(0)) for name in _COUNTS})
        # Nobody keeps a record of when a stranger was down.
        .withColumn("uptime", F.when(F.col("state") != UNREGISTERED, F.col("uptime")))
        .withColumns({"availability": _availability(), "reliability": share("delivered", "blamed")})
        .withColumns({"latency": _latency(), "trend_change": _trend_change(), "as_of": F.lit(window.as_of)})
        .withColumns({"score": score(), "trend": _trend()})
    )
    return advise(figures, until=until).to(SERVER_SCORECARD)


def _judged(servers: DataFrame, others: Iterable[DataFrame], *, until: datetime) -> DataFrame:
    """Return the servers of the registry as `server_url`, and those of `others` that are not in it."""
    registered = servers.withColumnRenamed("url", "server_url").withColumn("is_registered", F.lit(True))
    named = reduce(DataFrame.union, (each.select("server_url") for each in others)).distinct()
    strangers = named.join(registered, "server_url", "left_anti")
    known = registered.where(F.col("created_at") < F.lit(until))
    return known.unionByName(strangers.withColumn("is_registered", F.lit(False)), allowMissingColumns=True)


def _availability() -> Column:
    """Return the part of the window's deliveries that arrived, if what is down takes none; null for nothing."""
    up = F.coalesce("uptime", F.lit(1.0))
    return F.coalesce(share("delivered", "attempts") * up, F.when(up == 0, F.lit(0.0)))


def daily_in_windows(daily: DataFrame, window: Window, lengths: Iterable[int] = WINDOW_DAYS) -> DataFrame:
    """Return each daily row once for every window that it lies in.

    A window lasts one of `lengths` in days, up to and including `as_of`.
    """
    age = F.datediff(F.lit(window.as_of), F.col("day"))
    rows = daily.withColumn("_age", age).where(F.col("_age") >= 0)
    return rows.withColumn("window_days", _each_of(lengths)).where(F.col("_age") < F.col("window_days"))


def _each_of(numbers: Iterable[int]) -> Column:
    return F.explode(F.array(*(F.lit(number) for number in numbers)))


def blamed() -> Column:
    """Return how many of a daily row's attempts did not fail through our own fault."""
    return F.col("attempts") - _rows_with(OWN_FAULTS)


def relayed() -> Column:
    """Return how many of a daily row's deliveries went through relays."""
    return F.round(F.col("delivered") * F.coalesce("relayed_share", F.lit(0.0)))


def typical_p95() -> Column:
    """Return the median of daily p95s, weighted by deliveries."""
    # Only days with deliveries have a p95, and a weight of 0 is refused.
    weight = F.when(F.col("p95_ms").isNotNull(), F.col("delivered")).otherwise(1)
    return F.round(F.percentile("p95_ms", 0.5, weight)).cast("int")


def _traffic(in_windows: DataFrame) -> DataFrame:
    later = F.col("_age") < F.floor(F.col("window_days") / 2)
    slow = F.coalesce("slow", F.lit(0))
    rows = in_windows.withColumns({"blamed": blamed(), "slow": slow, "in_time": F.col("delivered") - slow})
    return rows.groupBy("server_url", "window_days").agg(
        F.sum("attempts").alias("attempts"),
        *(F.sum(name).alias(name) for name in ("delivered", "blamed", "slow", "in_time")),
        F.sum(relayed()).alias("relayed"),
        F.sum(_rows_with(FORGERIES)).alias("forged"),
        *(
            F.sum(F.when(half, F.col(name)).otherwise(0)).alias(f"{name}_{label}")
            for label, half in (("later", later), ("before", ~later))
            for name in ("delivered", "blamed", "slow", "in_time")
        ),
        typical_p95().alias("p95_ms"),
    )


def _top_errors(in_windows: DataFrame) -> DataFrame:
    """Return the most frequent error code; of equally frequent ones, the last by name."""
    counts = in_windows.select("server_url", "window_days", F.explode("errors").alias("code", "rows"))
    by_code = counts.groupBy("server_url", "window_days", "code").agg(F.sum("rows").alias("rows"))
    return by_code.groupBy("server_url", "window_days").agg(
        F.max_by("code", F.struct("rows", "code")).alias("top_error")
    )


def _standing(known: DataFrame, blacklist: DataFrame, outages: DataFrame) -> DataFrame:
    """Return, per server, its state, since when, and what the registry says about it."""
    refused = blacklist.groupBy("server_url").agg(
        F.min("created_at").alias("blacklisted_at"),
        F.max_by("reason", "created_at").alias("blacklist_reason"),
        F.lit(True).alias("is_blacklisted"),
    )
    last = outages.groupBy("server_url").agg(
        F.max(F.when(F.col("ended_at").isNull(), F.col("began_at"))).alias("down_since"),
        F.max("ended_at").alias("up_since"),
        F.max(F.col("ended_at").isNull()).alias("is_down"),
    )
    is_down = F.coalesce("is_down", F.lit(False))
    return (
        known.join(refused, "server_url", "left")
        .join(last, "server_url", "left")
        .select(
            "server_url",
            "unhealthy_reason",
            "blacklist_reason",
            F.when(F.col("is_blacklisted"), BLACKLISTED)
            .when(~F.col("is_registered"), UNREGISTERED)
            .when(is_down, ServerHealth.UNHEALTHY.value)
            .otherwise(ServerHealth.HEALTHY.value)
            .alias("state"),
            F.when(F.col("is_blacklisted"), F.col("blacklisted_at"))
            .when(is_down, F.col("down_since"))
            .otherwise(F.coalesce("up_since", "created_at"))
            .alias("state_since"),
        )
    )


def _without_registry(links: DataFrame | None, known: DataFrame) -> DataFrame:
    """Return the servers that need no registry, as another wire has a link to them."""
    others = known.limit(0) if links is None else links.where(F.col("wire") != DEFAULT_WIRE)
    return others.select("server_url").distinct().withColumn("needs_no_registry", F.lit(True))


def _key_findings(anomalies: DataFrame) -> DataFrame:
    """Return, per server, what was found about its keys: `suspicious_keys`, and `malformed_keys`."""
    malformed = F.col("kind") == AnomalyKind.MALFORMED.value
    return (
        anomalies.select("kind", "detail", F.explode("server_urls").alias("server_url"))
        .groupBy("server_url")
        .agg(
            F.sort_array(F.collect_set(F.when(~malformed, F.col("detail")))).alias("suspicious_keys"),
            F.sort_array(F.collect_set(F.when(malformed, F.col("detail")))).alias("malformed_keys"),
        )
    )


def _rows_with(codes: Iterable[str]) -> Column:
    counts = F.map_values(F.map_filter("errors", lambda code, _: code.isin(sorted(codes))))
    return F.aggregate(counts, F.lit(0).cast("long"), lambda total, rows: total + rows)


def _latency() -> Column:
    p95, span = F.col("p95_ms"), SLOWEST_MS - FAST_MS
    # `least` and `greatest` ignore nulls, but an unknown latency is not a good one.
    return F.when(p95.isNotNull(), F.greatest(F.least((SLOWEST_MS - p95) / span, F.lit(1.0)), F.lit(0.0)))


def score() -> Column:
    """Return the score, 0 to 100, from `reliability`, `uptime` and `latency`, or null if none is known."""
    reached, possible = F.lit(0.0), F.lit(0.0)
    for name, weight in WEIGHTS.items():
        reached += F.coalesce(F.col(name) * weight, F.lit(0.0))
        possible += F.when(F.col(name).isNotNull(), weight).otherwise(0.0)
    return F.when(possible > 0, 100 * reached / possible)


def _trend() -> Column:
    change = F.col("trend_change")
    return (
        F.when(change.isNull(), Trend.UNKNOWN.value)
        .when(change >= TREND_THRESHOLD, Trend.IMPROVING.value)
        .when(change <= -TREND_THRESHOLD, Trend.WORSENING.value)
        .otherwise(Trend.STABLE.value)
    )


def _trend_change() -> Column:
    enough = (F.col("blamed_later") >= TREND_ATTEMPTS) & (F.col("blamed_before") >= TREND_ATTEMPTS)
    change = F.col("delivered_later") / F.col("blamed_later") - F.col("delivered_before") / F.col("blamed_before")
    return F.when(enough, change)


def _window_begin(days: str, window: Window) -> Column:
    return F.timestamp_seconds(F.lit(int(midnight(window.until).timestamp())) - F.col(days) * int(DAY.total_seconds()))


_LOST_STATES: Final = (DeliveryState.FAILED, DeliveryState.EXPIRED)


def _owed_figures(windows: DataFrame, deliveries: DataFrame, losses: DataFrame) -> DataFrame:
    """Compute `owed`, `held`, `owed_since` and `lost` of each server and window, from rows of deliveries, not attempts.

    A delivery is owed while it is ready or held. It is lost when it has failed or expired: then its row is kept for a
    week, and what was written down when it was purged for a year. What an operator sends again is owed again.

    `windows` has `server_url`, `window_days`, `begins_at`, `ends_at`; `deliveries` and `losses` are checked ones. What
    is owed is so now, whichever window it is told with.
    """
    is_open = ~F.col("state").isin([state.value for state in _LOST_STATES]) & F.col("settled_at").isNull()
    owed = (
        deliveries.where(is_open)
        .groupBy("server_url")
        .agg(
            F.count("*").alias("owed"),
            F.count_if(F.col("state") == DeliveryState.HELD.value).alias("held"),
            F.min("created_at").alias("owed_since"),
        )
    )
    given_up = deliveries.where(~is_open).select("id", "server_url", F.col("settled_at").alias("lost_at"))
    lost_at = given_up.unionByName(losses.select("id", "server_url", "lost_at")).dropDuplicates(["id"])
    inside = (F.col("lost_at") >= F.col("begins_at")) & (F.col("lost_at") < F.col("ends_at"))
    key = ["server_url", "window_days"]
    lost = windows.join(lost_at, "server_url").where(inside).groupBy(*key).agg(F.count("*").alias("lost"))
    counts = {name: F.coalesce(name, F.lit(0)) for name in ("owed", "held", "lost")}
    return windows.select(*key).join(owed, "server_url", "left").join(lost, key, "left").withColumns(counts)
