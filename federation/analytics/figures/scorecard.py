"""Scorecards: every known server over the last 7 and the last 30 days, from its daily rows and its outages.

By definition, over the days of a window, with `blamed` for the attempts whose failure is not our own (see
`OWN_FAULTS`), nor in an hour of our own trouble:

- reliability = delivered / blamed attempts;
- latency = 1 up to a p95 of 1 s, falling in proportion to 0 at 15 s, which is a delivery's deadline;
- arrived = delivered / (delivered + lost + owed), 1 for nothing: what waits, or was given up, did not get there;
- present = 1 for a server that is up; one that is down loses a third for each day that it is;
- score = 100 · arrived · present · (0.6 · reliability + 0.3 · uptime + 0.1 · latency). What is unknown (no attempts,
  nothing delivered) is left out and the other weights grow in proportion;
- p95 = the median of the daily p95s, each weighted by that day's deliveries: that of a typical day, which one bad day
  does not change. Percentiles of days cannot be merged into that of the window;
- trend = reliability of the window's later half (the last 3 of 7 days, the last 15 of 30) minus that of the days
  before; less than 5 points up or down is stable, and fewer than 10 blamed attempts on either side say nothing.

`availability` is delivered / attempts, our own faults included, as in the daily rows, times the share of the window in
which the server was up: while it is down deliveries are held and burn no attempts, and it is not to look better for it.

`action` and `reasons` are the verdict on the server, and stand in both of its rows.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import DEFAULT_WIRE, DeliveryState, LinkState, ServerHealth
from federation.analytics.days import DAY, MONTH, WEEK, midnight, seconds_between
from federation.analytics.figures.actions import PARK_AFTER, UNTOLD, advise, later_days
from federation.analytics.figures.daily import share
from federation.analytics.figures.keys import vouched_for
from federation.analytics.figures.outages import outage_figures
from federation.analytics.figures.owed import lost_deliveries, owed_figures, still_open
from federation.analytics.figures.own_trouble import with_excused
from federation.analytics.frames import (
    BLACKLISTED,
    SERVER_SCORECARD,
    UNREGISTERED,
    Action,
    AnomalyKind,
    Trend,
    Window,
    as_it_is,
)
from federation.codes import FORGERIES, OWN_FAULTS
from federation.servers.blacklist_rules import STAR

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

_BAD_ACKS: Final = ("INVALID_ACK", "NO_ACK")
"""Codes of a server that acknowledges follows in a form that is none. Whoever poses as it is told by the signature."""

_OF_LINKS: Final = ("wire", "state", "reason")
_HALVED: Final = ("delivered", "blamed", "slow", "in_time", "forged", "bad_acks")
_COUNTS: Final = ("attempts", "delivered", "blamed", "slow", "forged", "bad_acks", "forged_later", "bad_acks_later")


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
    accepted: DataFrame | None = None,
    trouble: DataFrame | None = None,
    events: DataFrame | None = None,
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
    recent = lost_deliveries(deliveries, losses).where(F.col("lost_at") >= _before(F.lit(MONTH), window))
    failed = recent.where(F.col("state") == DeliveryState.FAILED.value)
    named = (
        in_windows.where(F.col("delivered") > 0),
        still_open(deliveries),
        # Only what was in the registry has a record of its health: it was forgotten, and what it lost is past.
        failed if events is None else failed.join(events, "server_url", "left_anti"),
    )
    known = keep(_judged(servers, named, until=until), by_server=True)
    windows = known.select("server_url", "created_at", _each_of(WINDOW_DAYS).alias("window_days")).select(
        "server_url",
        "window_days",
        F.greatest(_known_at(until), _before("window_days", window)).alias("begins_at"),
        _before(later_days(), window).alias("later_at"),
        F.lit(until).alias("ends_at"),
    )
    key = ["server_url", "window_days"]
    joined = (
        outage_figures(windows, outages)
        .join(_traffic(with_excused(_with_forgeries(in_windows, servers, accepted), trouble)), key, "left")
        .join(_top_errors(in_windows), key, "left")
        .join(owed_figures(windows, deliveries, losses), key, "left")
        .join(_standing(known, blacklist, outages), "server_url")
        .join(_by_links(links, known), "server_url", "left")
        .join(_key_findings(anomalies), "server_url", "left")
    )
    figures = (
        keep(joined, by_server=True)
        .withColumns({name: F.coalesce(name, F.lit(0)) for name in _COUNTS})
        # Nobody keeps a record of when a stranger was down.
        .withColumn("uptime", F.when(F.col("state") != UNREGISTERED, F.col("uptime")))
        .withColumns({"availability": _availability(), "reliability": share("delivered", "blamed")})
        .withColumns({"latency": _latency(), "trend_change": _trend_change(), "as_of": F.lit(window.as_of)})
        .withColumns({"score": score() * _arrived() * _present(until), "trend": _trend()})
    )
    return _one_verdict(advise(figures, until=until)).to(SERVER_SCORECARD)


def _one_verdict(cards: DataFrame) -> DataFrame:
    """Give both rows of a server the graver advice with its reasons; of two alike, those of the shorter window."""
    gravity = F.array_position(F.array(*(F.lit(action.value) for action in Action)), F.col("action"))
    weight = gravity * 1000 - F.col("window_days")
    of_server = Over.partitionBy("server_url")
    return cards.withColumns({name: F.max_by(name, weight).over(of_server) for name in ("action", "reasons")})


def _judged(servers: DataFrame, others: Iterable[DataFrame], *, until: datetime) -> DataFrame:
    """Return the servers of the registry as `server_url`, and those of `others` that are not in it.

    A stranger that took nothing and that nothing is owed to was removed: nobody waits for advice on it.
    """
    registered = servers.withColumnRenamed("url", "server_url").withColumn("is_registered", F.lit(True))
    named = reduce(DataFrame.union, (each.select("server_url") for each in others)).distinct()
    known = registered.join(named.withColumn("is_named", F.lit(True)), "server_url", "outer")
    was_known = F.col("created_at").isNull() | (F.col("created_at") < F.lit(until))
    return known.where(was_known | F.col("is_named")).withColumn("is_registered", F.col("is_registered").isNotNull())


def _known_at(until: datetime) -> Column:
    """Return since when a server is known; null if that is not on record, or it was introduced again after `until`."""
    return F.when(F.col("created_at") < F.lit(until), F.col("created_at"))


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
    """Return how many of a daily row's attempts did not fail through our own fault, nor in our own trouble.

    Some did both. A forged answer is never excused.
    """
    unproven = F.col("attempts") - F.col("delivered") - _rows_with(FORGERIES)
    return F.col("attempts") - F.greatest(_rows_with(OWN_FAULTS), F.least("excused", unproven))


def relayed() -> Column:
    """Return how many of a daily row's deliveries went through relays."""
    return F.round(F.col("delivered") * F.coalesce("relayed_share", F.lit(0.0)))


def typical_p95() -> Column:
    """Return the median of daily p95s, weighted by deliveries."""
    # Only days with deliveries have a p95, and a weight of 0 is refused.
    weight = F.when(F.col("p95_ms").isNotNull(), F.col("delivered")).otherwise(1)
    return F.round(F.percentile("p95_ms", 0.5, weight)).cast("int")


def _with_forgeries(in_windows: DataFrame, servers: DataFrame, accepted: DataFrame | None) -> DataFrame:
    """Add `forged`: what was signed with another's key, since the day when somebody vouched for the registered one."""
    forged = _rows_with(FORGERIES)
    if accepted is None:
        return in_windows.withColumn("forged", forged)
    vouched = F.broadcast(vouched_for(servers, accepted))
    is_settled = F.coalesce(F.col("day") <= F.col("accepted_on"), F.lit(False))
    return in_windows.join(vouched, "server_url", "left").withColumn("forged", F.when(is_settled, 0).otherwise(forged))


def _traffic(in_windows: DataFrame) -> DataFrame:
    later = F.col("_age") < later_days()
    slow = F.coalesce("slow", F.lit(0))
    rows = in_windows.withColumns(
        {"blamed": blamed(), "slow": slow, "in_time": F.col("delivered") - slow, "bad_acks": _rows_with(_BAD_ACKS)}
    )
    return rows.groupBy("server_url", "window_days").agg(
        F.sum("attempts").alias("attempts"),
        *(F.sum(name).alias(name) for name in _HALVED),
        F.sum(relayed()).alias("relayed"),
        *(
            F.sum(F.when(half, F.col(name)).otherwise(0)).alias(f"{name}_{label}")
            for label, half in (("later", later), ("before", ~later))
            for name in _HALVED
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
    last = outages.groupBy("server_url").agg(
        F.max(F.when(F.col("ended_at").isNull(), F.col("began_at"))).alias("down_since"),
        F.max("ended_at").alias("up_since"),
        F.max(F.col("ended_at").isNull()).alias("is_down"),
        F.max(F.col("is_excused")).alias("is_excused"),
    )
    is_down = F.coalesce("is_down", F.lit(False))
    return (
        known.join(_refused(known, blacklist), "server_url", "left")
        .join(last, "server_url", "left")
        .select(
            "server_url",
            "unhealthy_reason",
            "blacklist_reason",
            F.coalesce("is_excused", F.lit(False)).alias("is_excused"),
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


def _refused(servers: DataFrame, blacklist: DataFrame) -> DataFrame:
    """Return those of `servers` that a rule covers, by its URL or for a domain that it is in, as in the node.

    Their columns are `server_url`, `blacklisted_at`, `blacklist_reason`. Servers are looked up by their own names and
    the domains above, so that the work does not grow with the rules.
    """
    labels = F.split(F.lower(F.regexp_extract("server_url", r"^[A-Za-z]+://([^:/\[]+)", 1)), r"\.")
    domains = F.transform(
        F.sequence(F.lit(1), F.size(labels)),
        lambda place: F.concat(F.lit(STAR), F.array_join(F.slice(labels, place, F.size(labels)), ".")),
    )
    rules = blacklist.withColumnRenamed("server_url", "rule")
    covering = F.explode(F.array_append(domains, F.col("server_url")))
    return (
        servers.select("server_url", covering.alias("rule"))
        .join(rules, "rule")
        .groupBy("server_url")
        .agg(
            F.min("created_at").alias("blacklisted_at"),
            F.max_by("reason", "created_at").alias("blacklist_reason"),
            F.lit(True).alias("is_blacklisted"),
        )
    )


def _by_links(links: DataFrame | None, known: DataFrame) -> DataFrame:
    """Return, per server, whether it needs no registry, as another wire has a link to it, and why a link is closed."""
    if links is None:
        links = known.limit(0).select("server_url", *(F.lit(None).cast("string").alias(n) for n in _OF_LINKS))
    closed = (F.col("state") != LinkState.UP.value) & (F.col("reason") != UNTOLD)
    others = links.groupBy("server_url").agg(
        F.max(F.col("wire") != DEFAULT_WIRE).alias("needs_no_registry"),
        F.max(F.when(closed, F.col("reason"))).alias("link_reason"),
    )
    return others.withColumn("needs_no_registry", F.when(F.col("needs_no_registry"), True))


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


def _arrived() -> Column:
    owing = F.col("delivered") + F.col("lost") + F.col("owed")
    return F.when(owing > 0, F.col("delivered") / owing).otherwise(1.0)


def _present(until: datetime) -> Column:
    is_down = (F.col("state") == ServerHealth.UNHEALTHY.value) & ~F.col("is_excused")
    away = F.coalesce(seconds_between(F.col("state_since"), F.lit(until)), F.lit(PARK_AFTER.total_seconds()))
    return F.when(is_down, F.greatest(1 - away / PARK_AFTER.total_seconds(), F.lit(0.0))).otherwise(1.0)


def _before(days: str | Column, window: Window) -> Column:
    """Return the time so many days before the window's end."""
    number = F.col(days) if isinstance(days, str) else days
    return F.timestamp_seconds(F.lit(int(midnight(window.until).timestamp())) - number * int(DAY.total_seconds()))
