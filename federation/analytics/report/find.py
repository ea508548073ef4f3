"""The findings, read from what a run wrote, so that a report can be made again at any time.

Nothing here grows with the number of attempts or servers: Spark counts and ranks, and the driver receives only days,
error codes, and the first few of each list.
"""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window as Over
from pyspark.sql import functions as sf

from db import ServerHealth
from federation.analytics.data.results import (
    KEY_ANOMALIES,
    NETWORK_SUMMARY,
    QUARANTINE,
    RELAY_CANDIDATES,
    SERVER_DAILY,
    SERVER_SCORECARD,
    read_dated,
    read_days,
    read_undated,
)
from federation.analytics.days import WEEK, instant, midnight
from federation.analytics.frames import Action
from federation.analytics.report.findings import (
    BAD_DAY,
    DAYS,
    FEWEST_ATTEMPTS,
    LATENCY_BOUNDS_MS,
    MOST_ANOMALIES,
    MOST_CODES,
    MOST_PER_ACTION,
    MOST_QUARANTINE,
    MOST_RANKED,
    MOST_URLS,
    SCORE_BOUNDS,
    Anomaly,
    Day,
    ErrorCode,
    Findings,
    Period,
    RelayFinding,
    Server,
    SetAside,
    Since,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, Row, SparkSession

    from federation.analytics.data.snapshots import Place

_ALL_CODES: Final = 1000  # more than exist: HTTP_100 to HTTP_999 and two dozen names
_URGENCY: Final = tuple(Action)


def find(spark: SparkSession, out: Place, as_of: date) -> Findings:
    """Return what the results in `out` say as of `as_of`.

    Raises:
        FileNotFoundError: no run has written results of that day.
    """
    wanted = [as_of - timedelta(days=back) for back in reversed(range(DAYS))]
    scorecards = read_dated(spark, out, SERVER_SCORECARD, as_of)
    network = read_days(spark, out, NETWORK_SUMMARY, wanted).orderBy("day").collect()
    days = tuple(Day(**{name: row[name] for name in Day.__dataclass_fields__}) for row in network)
    totals = _error_totals(network)
    verdicts = _verdicts(scorecards).cache()
    try:
        attention, worst, best = _ranked(verdicts)
        daily = _availability(read_days(spark, out, SERVER_DAILY, wanted), [*attention, *worst, *best])
        relays = read_dated(spark, out, RELAY_CANDIDATES, as_of)
        anomalies = read_dated(spark, out, KEY_ANOMALIES, as_of)
        aside = read_days(spark, out, QUARANTINE, wanted).unionByName(read_undated(spark, out, QUARANTINE))
        quarantine = _quarantine(aside)
        return Findings(
            as_of=as_of,
            days=days,
            errors=_errors(network, list(totals)[:MOST_CODES], totals),
            error_totals=totals,
            actions=_actions(verdicts),
            attention=_servers(attention, days, daily),
            worst=_servers(worst, days, daily),
            best=_servers(best, days, daily),
            latencies=_spread(verdicts, "week.p95_ms", [sf.col("week.p95_ms") > bound for bound in LATENCY_BOUNDS_MS]),
            scores=_spread(verdicts, "month.score", [sf.col("month.score") >= bound for bound in SCORE_BOUNDS]),
            relays=_relays(relays),
            relay_count=relays.count(),
            anomalies=_anomalies(anomalies),
            anomaly_counts={row["kind"]: row["count"] for row in anomalies.groupBy("kind").count().collect()},
            quarantine=quarantine[:MOST_QUARANTINE],
            quarantined=sum(each.rows for each in quarantine),
        )
    finally:
        verdicts.unpersist()


def _error_totals(network: Sequence[Row]) -> dict[str, int]:
    """Count failures by code, the most frequent first."""
    totals: Counter[str] = Counter()
    for row in network:
        totals.update(row["errors"] or {})
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _errors(network: Sequence[Row], codes: Sequence[str], totals: Mapping[str, int]) -> tuple[ErrorCode, ...]:
    daily = [row["errors"] or {} for row in network]
    return tuple(
        ErrorCode(code=code, total=totals[code], daily=tuple(errors.get(code, 0) for errors in daily)) for code in codes
    )


def _verdicts(scorecards: DataFrame) -> DataFrame:
    """Return one row per server: both its windows, the more urgent action, and why."""
    urgency = sf.array_position(sf.array(*(sf.lit(action.value) for action in _URGENCY)), sf.col("action"))
    # If both windows ask for the same action, the shorter one says why.
    weight = urgency * 1000 - sf.col("window_days")
    reasons = sf.transform(sf.slice("reasons", 1, 5), lambda reason: sf.substring(reason, 1, 300))
    return scorecards.groupBy("server_url").agg(
        sf.max(urgency).alias("urgency"),
        sf.max_by(reasons, weight).alias("reasons"),
        _of_window(WEEK, "week"),
        _of_window(DAYS, "month"),
        *(sf.min_by(name, "window_days").alias(name) for name in ("state", "top_error", "trend")),
        sf.min_by(sf.unix_micros("state_since"), "window_days").alias("state_since"),
    )


def _of_window(days: int, name: str) -> Column:
    values = sf.struct(*Period.__dataclass_fields__)
    return sf.first(sf.when(sf.col("window_days") == days, values), ignorenulls=True).alias(name)


def _ranked(verdicts: DataFrame) -> tuple[list[Row], list[Row], list[Row]]:
    """Return those that need attention, the worst and the best, each list cut short."""
    failed = sf.coalesce(sf.col("week.attempts") - sf.col("week.delivered"), sf.lit(0))
    place = sf.row_number().over(Over.partitionBy("urgency").orderBy(failed.desc(), "server_url"))
    urgent = verdicts.where(sf.col("urgency") > 1).withColumn("place", place).where(sf.col("place") <= MOST_PER_ACTION)
    judged = verdicts.where(sf.col("month.score").isNotNull() & (sf.col("month.attempts") >= FEWEST_ATTEMPTS))
    traffic = sf.col("month.attempts")
    worst = judged.orderBy(sf.asc("month.score"), traffic.desc(), "server_url")
    best = judged.orderBy(sf.desc("month.score"), traffic.desc(), "server_url")
    rows = urgent.orderBy(sf.desc("urgency"), "place").collect()
    return rows, worst.limit(MOST_RANKED).collect(), best.limit(MOST_RANKED).collect()


def _availability(daily: DataFrame, servers: Iterable[Row]) -> dict[tuple[str, date], float]:
    urls = sorted({row["server_url"] for row in servers})
    known = daily.where(sf.col("server_url").isin(urls) & sf.col("availability").isNotNull())
    rows = known.select("server_url", "day", "availability").collect()
    return {(row["server_url"], row["day"]): row["availability"] for row in rows}


def _servers(
    rows: Iterable[Row], days: Sequence[Day], availability: Mapping[tuple[str, date], float]
) -> tuple[Server, ...]:
    return tuple(
        _server(row, days, tuple(availability.get((row["server_url"], each.day)) for each in days)) for row in rows
    )


def _server(row: Row, days: Sequence[Day], daily: tuple[float | None, ...]) -> Server:
    sick_since = row["state_since"] if row["state"] == ServerHealth.UNHEALTHY else None
    return Server(
        url=row["server_url"],
        action=_URGENCY[max(row["urgency"], 1) - 1],
        reasons=tuple(row["reasons"] or ()),
        since=Since(at=instant(sick_since)) if sick_since is not None else _first_bad_day(days, daily),
        top_error=row["top_error"],
        trend=row["trend"],
        week=_period(row["week"]),
        month=_period(row["month"]),
        daily=daily,
    )


def _first_bad_day(days: Sequence[Day], daily: Sequence[float | None]) -> Since | None:
    """Return where the bad days begin that last until now, or None if the last day was good.

    Days without attempts are ignored.
    """
    bad: date | None = None
    for each, availability in zip(reversed(days), reversed(daily), strict=True):
        if availability is None:
            continue
        if availability >= BAD_DAY:
            break
        bad = each.day
    else:
        return None if bad is None else Since(at=midnight(bad), at_least=True)
    return None if bad is None else Since(at=midnight(bad))


def _period(row: Row | None) -> Period:
    if row is None:
        return Period()
    return Period(**row.asDict() | {"attempts": row["attempts"] or 0, "delivered": row["delivered"] or 0})


def _actions(verdicts: DataFrame) -> dict[Action, int]:
    counts = {row["urgency"]: row["count"] for row in verdicts.groupBy("urgency").count().collect()}
    return {action: counts.get(place, 0) for place, action in reversed(list(enumerate(_URGENCY, start=1)))}


def _spread(verdicts: DataFrame, value: str, above: Sequence[Column]) -> tuple[int, ...]:
    """Count the servers between two bounds, by how many of the bounds they are `above`."""
    bucket = sum((sf.when(each, 1).otherwise(0) for each in above), start=sf.lit(0))
    rows = verdicts.where(sf.col(value).isNotNull()).groupBy(bucket.alias("bucket")).count().collect()
    counts = {row["bucket"]: row["count"] for row in rows}
    return tuple(counts.get(place, 0) for place in range(len(above) + 1))


def _relays(candidates: DataFrame) -> tuple[RelayFinding, ...]:
    last_seen = sf.unix_micros("last_seen").alias("last_seen")
    columns = ["rank", "server_url", "score", "availability", "p95_ms"]
    rows = candidates.select(*columns, last_seen).orderBy("rank", "server_url").limit(MOST_RANKED).collect()
    return tuple(
        RelayFinding(
            rank=row["rank"],
            url=row["server_url"],
            score=row["score"],
            availability=row["availability"],
            p95_ms=row["p95_ms"],
            last_seen=None if row["last_seen"] is None else instant(row["last_seen"]),
        )
        for row in rows
    )


def _anomalies(anomalies: DataFrame) -> tuple[Anomaly, ...]:
    shown = anomalies.select(
        "kind",
        "key_kind",
        "fingerprint",
        sf.slice("server_urls", 1, MOST_URLS).alias("urls"),
        sf.size("server_urls").alias("servers"),
        sf.substring("detail", 1, 300).alias("detail"),
    )
    rows = shown.orderBy(sf.desc("servers"), "kind", "key_kind", "fingerprint", "urls").limit(MOST_ANOMALIES).collect()
    return tuple(Anomaly(**row.asDict() | {"urls": tuple(row["urls"] or ())}) for row in rows)


def _quarantine(quarantine: DataFrame) -> tuple[SetAside, ...]:
    counts = quarantine.groupBy("source", "reason").count().orderBy(sf.desc("count"), "source", "reason")
    return tuple(
        SetAside(source=row["source"], reason=row["reason"], rows=row["count"])
        for row in counts.limit(_ALL_CODES).collect()
    )
