"""The findings, read from what a run wrote, so that a report can be made again at any time.

Nothing here grows with the number of attempts or servers: Spark counts and ranks, and the driver receives only days,
error codes, and the first few of each list. Earlier results tell what is different: the advice of the day before, and
who came and went within the month.
"""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf

from federation.analytics.data.results import (
    KEY_ANOMALIES,
    NETWORK_SUMMARY,
    QUARANTINE,
    RELAY_CANDIDATES,
    SERVER_DAILY,
    SERVER_SCORECARD,
    is_stored,
    read_dated,
    read_days,
    read_undated,
)
from federation.analytics.days import MONTH, WEEK, instant
from federation.analytics.frames import UNREGISTERED, Action
from federation.analytics.jvm import size_of
from federation.analytics.report.findings import (
    DAYS,
    LATENCY_BOUNDS_MS,
    MOST_ANOMALIES,
    MOST_CHANGES,
    MOST_CODES,
    MOST_QUARANTINE,
    MOST_RANKED,
    MOST_URLS,
    SCORE_BOUNDS,
    AdviceChange,
    Anomaly,
    Appearance,
    Changes,
    Completeness,
    Day,
    ErrorCode,
    Findings,
    Hours,
    RelayedServer,
    RelayFinding,
    Relaying,
    SetAside,
    Turnover,
)
from federation.analytics.report.verdicts import (
    URGENCY,
    actions,
    busiest,
    counts,
    first_of,
    obligations,
    outages,
    servers_of,
    spread,
    states,
    totals,
    urgent,
    verdicts,
    with_days,
    worst_and_best,
)
from federation.analytics.session import few_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import date

    from pyspark.sql import Column, DataFrame, Row, SparkSession

    from federation.analytics.data.computed import Computed
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


_ALL_CODES: Final = 1000  # more than exist: HTTP_100 to HTTP_999 and two dozen names
_ATTEMPTS: Final = "attempts"
_FEW_BYTES: Final = 16 * 2**20
"""Of scorecards in a file; they are some 100 000 servers'."""


def find(spark: SparkSession, out: Place, as_of: date, computed: Computed) -> Findings:
    """Return what the results in `out` say as of `as_of`; `computed` is what is noted of their days.

    Raises:
        FileNotFoundError: no run has written results of that day.
    """
    with few_rows(spark, when=size_of(read_dated(spark, out, SERVER_SCORECARD, as_of)) <= _FEW_BYTES):
        return _find(spark, out, as_of, computed)


def _find(spark: SparkSession, out: Place, as_of: date, computed: Computed) -> Findings:
    wanted = [as_of - timedelta(days=back) for back in reversed(range(DAYS))]
    scorecards = read_dated(spark, out, SERVER_SCORECARD, as_of)
    network = read_days(spark, out, NETWORK_SUMMARY, wanted).orderBy("day").collect()
    days = tuple(map(_day, network))
    codes = _error_totals(network)
    stored = read_days(spark, out, SERVER_DAILY, wanted)
    by_day = _by_day(stored)
    quarantine = _quarantine(
        read_days(spark, out, QUARANTINE, wanted).unionByName(read_undated(spark, out, QUARANTINE))
    )
    found = verdicts(scorecards).cache()
    try:
        counted, total = counts(found), totals(found)
        attention, (worst, best) = urgent(found), worst_and_best(found)
        shown = {row["server_url"] for row in (*with_days(attention), *worst, *best)}
        daily, hours = _availability(stored, shown), _failed_hours(stored, shown)
        relays = read_dated(spark, out, RELAY_CANDIDATES, as_of)
        anomalies = read_dated(spark, out, KEY_ANOMALIES, as_of)
        return Findings(
            as_of=as_of,
            days=days,
            errors=_errors(network, list(codes)[:MOST_CODES], codes),
            error_totals=codes,
            actions=actions(counted),
            states=states(counted),
            urgent_states=states(row for row in counted if row["urgency"] > 1),
            attention=servers_of(attention, days, daily, hours, shown=shown),
            changes=changes(spark, out, as_of, found),
            turnover=turnover(spark, out, as_of),
            obligations=obligations(found, total, _owed_by_day(spark, out, as_of)),
            outages=outages(found, total),
            relaying=_relaying(stored, [by_day.get(day.day) for day in days]),
            completeness=_completeness(computed, wanted, days, by_day.values(), quarantine),
            busiest=busiest(found),
            week_attempts=total["week_attempts"],
            worst=servers_of(worst, days, daily, hours, shown=shown),
            best=servers_of(best, days, daily, hours, shown=shown),
            latencies=spread(found, "week.p95_ms", [sf.col("week.p95_ms") > bound for bound in LATENCY_BOUNDS_MS]),
            scores=spread(found, "month.score", [sf.col("month.score") >= bound for bound in SCORE_BOUNDS]),
            relays=_relays(relays),
            relay_count=relays.count(),
            anomalies=_anomalies(anomalies),
            anomaly_counts={row["kind"]: row["count"] for row in anomalies.groupBy("kind").count().collect()},
            quarantine=quarantine[:MOST_QUARANTINE],
            quarantined=sum(each.rows for each in quarantine),
        )
    finally:
        found.unpersist()


def _by_day(daily: DataFrame) -> dict[date, Row]:
    """Return what was relayed and parked, by day."""
    rows = daily.withColumn("relayed", _relayed()).groupBy("day")
    return {
        row["day"]: row
        for row in rows.agg(sf.sum("relayed").alias("relayed"), sf.sum("parked").alias("parked")).collect()
    }


def _relayed() -> Column:
    """Return how many of a daily row's deliveries went through relays."""
    return sf.round(sf.col("delivered") * sf.coalesce("relayed_share", sf.lit(0.0))).cast("long")


def _relaying(daily: DataFrame, by_day: Sequence[Row | None]) -> Relaying:
    sums = (
        daily.withColumn("relayed", _relayed())
        .groupBy("server_url")
        .agg(sf.sum("relayed").alias("relayed"), sf.sum("delivered").alias("delivered"))
        .where(sf.col("relayed") > 0)
    )
    rows = first_of(sums, sf.col("relayed") > 0, [sf.desc("relayed"), sf.col("server_url")], MOST_RANKED)
    return Relaying(
        daily=tuple(row["relayed"] if row else 0 for row in by_day),
        server_count=rows[0]["number"] if rows else 0,
        servers=tuple(
            RelayedServer(url=row["server_url"], relayed=row["relayed"], delivered=row["delivered"]) for row in rows
        ),
    )


def _completeness(
    computed: Computed, wanted: Sequence[date], days: Sequence[Day], by_day: Iterable[Row], aside: Iterable[SetAside]
) -> Completeness:
    present = {day.day for day in days}
    return Completeness(
        missing=tuple(day for day in wanted if day not in present),
        early=computed.early(sorted(present)),
        purged=computed.partly_purged(wanted),
        attempts=sum(day.attempts for day in days),
        parked=sum(row["parked"] for row in by_day),
        set_aside=sum(each.rows for each in aside if each.source == _ATTEMPTS),
    )


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


def _availability(daily: DataFrame, urls: Iterable[str]) -> dict[tuple[str, date], float]:
    known = daily.where(sf.col("server_url").isin(sorted(urls)) & sf.col("availability").isNotNull())
    rows = known.select("server_url", "day", "availability").collect()
    return {(row["server_url"], row["day"]): row["availability"] for row in rows}


def _failed_hours(daily: DataFrame, urls: Iterable[str]) -> dict[str, Hours]:
    """Count the failures of each server by weekday and hour."""
    known = daily.where(sf.col("server_url").isin(sorted(urls))).select(
        "server_url", sf.weekday("day").alias("weekday"), sf.explode("failed_hours").alias("hour", "failed")
    )
    sums = known.groupBy("server_url", "weekday", "hour").agg(sf.sum("failed").alias("failed")).collect()
    found: dict[str, list[list[int]]] = {}
    for row in sums:
        week = found.setdefault(row["server_url"], [[0] * 24 for _ in range(WEEK)])
        week[row["weekday"]][row["hour"]] = row["failed"]
    return {url: tuple(map(tuple, week)) for url, week in found.items()}


def _owed_by_day(spark: SparkSession, out: Place, as_of: date) -> list[tuple[date, int, int]]:
    """Return what was owed, and of that held, as each of the results of 30 days has it."""
    days = [*_stored(out, as_of), as_of]
    cards = read_days(spark, out, SERVER_SCORECARD, days, ("as_of", "window_days", "owed", "held"))
    sums = cards.where(sf.col("window_days") == WEEK).groupBy("as_of")
    rows = sums.agg(*(sf.coalesce(sf.sum(name), sf.lit(0)).alias(name) for name in ("owed", "held"))).orderBy("as_of")
    return [(row["as_of"], row["owed"], row["held"]) for row in rows.collect()]


def _day(row: Row) -> Day:
    known = {name: row[name] for name in Day.__dataclass_fields__}
    # Days that an earlier version computed lack these.
    return Day(**known | {"lost": row["lost"] or 0, "own_trouble": tuple(row["own_trouble"] or ())})


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
        "found_on",
    )
    rows = shown.orderBy(sf.desc("servers"), "kind", "key_kind", "fingerprint", "urls").limit(MOST_ANOMALIES).collect()
    return tuple(Anomaly(**row.asDict() | {"urls": tuple(row["urls"] or ())}) for row in rows)


def _quarantine(quarantine: DataFrame) -> tuple[SetAside, ...]:
    counts = quarantine.groupBy("source", "reason").count().orderBy(sf.desc("count"), "source", "reason")
    return tuple(
        SetAside(source=row["source"], reason=row["reason"], rows=row["count"])
        for row in counts.limit(_ALL_CODES).collect()
    )
