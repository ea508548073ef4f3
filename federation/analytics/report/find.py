"""The findings, read from what a run wrote, so that a report can be made again at any time.

Nothing here grows with the number of attempts or servers: Spark counts and ranks, and the driver receives only days,
error codes, and the first few of each list. Earlier results tell what is different: the advice of the day before, and
who came and went within the month.
"""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as sf

from federation.analytics.data import results
from federation.analytics.days import MONTH, WEEK
from federation.analytics.frames import UNREGISTERED
from federation.analytics.jvm import size_of
from federation.analytics.report import findings, verdicts
from federation.analytics.session import few_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import date

    from pyspark.sql import Column, DataFrame, Row, SparkSession

    from federation.analytics.data.computed import Computed
    from federation.analytics.data.snapshots import Place


def changes(spark: SparkSession, out: Place, as_of: date, found: DataFrame) -> findings.Changes:
    """Compare the verdicts `found` with those of the results before, if there are any within a week."""
    earlier = [day for day in _stored(out, as_of) if (as_of - day).days <= WEEK]
    if not earlier:
        return findings.Changes()
    before = verdicts.verdicts(results.read_dated(spark, out, results.SERVER_SCORECARD, earlier[-1])).select(
        "server_url", sf.col("urgency").alias("before"), sf.col("owed").alias("owed_before")
    )
    [then] = before.agg(
        sf.count_if(sf.col("before") > 1).alias("urgent"), sf.coalesce(sf.sum("owed_before"), sf.lit(0)).alias("owed")
    ).collect()
    changed = found.join(before, "server_url").where(sf.col("urgency") != sf.col("before"))
    is_worse = sf.col("urgency") > sf.col("before")
    order = [sf.desc(sf.greatest("urgency", "before")), sf.desc_nulls_last("week.attempts"), sf.col("server_url")]
    rows = verdicts.first_of(changed, is_worse, order, findings.MOST_CHANGES)
    worse, better = ([row for row in rows if (row["urgency"] > row["before"]) is way] for way in (True, False))
    return findings.Changes(
        since=earlier[-1],
        urgent_before=then["urgent"],
        owed_before=then["owed"],
        **_listed("worse", worse, _advice),
        **_listed("better", better, _advice),
    )


def turnover(spark: SparkSession, out: Place, as_of: date) -> findings.Turnover:
    """Find who was not in the registry in the earliest results of 30 days and is now, and the other way round."""
    days = [*_stored(out, as_of), as_of]
    if len(days) == 1:
        return findings.Turnover()
    columns = ("server_url", "as_of", "window_days", "state", "action")
    cards = results.read_days(spark, out, results.SERVER_SCORECARD, days, columns)
    registered = cards.where((sf.col("window_days") == WEEK) & (sf.col("state") != UNREGISTERED))
    seen = registered.groupBy("server_url").agg(
        sf.min("as_of").alias("first"),
        sf.max("as_of").alias("last"),
        sf.max_by(verdicts.urgency_of("action"), "as_of").alias("urgency"),
    )
    is_gone, is_new = sf.col("last") < sf.lit(as_of), sf.col("first") > sf.lit(days[0])
    moved = seen.where(is_gone | is_new).withColumn("day", sf.when(is_gone, sf.col("last")).otherwise(sf.col("first")))
    rows = verdicts.first_of(moved, is_gone, [sf.desc("day"), sf.col("server_url")], findings.MOST_CHANGES)
    vanished, arrived = ([row for row in rows if (row["last"] < as_of) is way] for way in (True, False))
    return findings.Turnover(
        since=days[0], **_listed("arrived", arrived, _appearance), **_listed("vanished", vanished, _appearance)
    )


def _listed(name: str, rows: Sequence[Row], made: Callable[[Row], object]) -> dict[str, Any]:
    return {name: tuple(map(made, rows)), f"{name}_count": _number(rows)}


def _number(rows: Sequence[Row]) -> int:
    return rows[0]["number"] if rows else 0


def _stored(out: Place, as_of: date) -> list[date]:
    """Return the days of the month before `as_of` of which there are scorecards, the oldest first."""
    before = (as_of - timedelta(days=number) for number in range(MONTH - 1, 0, -1))
    return [day for day in before if results.is_stored(out, results.SERVER_SCORECARD, day)]


def _advice(row: Row) -> findings.AdviceChange:
    return findings.AdviceChange(
        url=row["server_url"],
        before=verdicts.action_of(row["before"]),
        now=verdicts.action_of(row["urgency"]),
        reason=row["reasons"][0] if row["reasons"] else None,
    )


def _appearance(row: Row) -> findings.Appearance:
    return findings.Appearance(url=row["server_url"], day=row["day"], action=verdicts.action_of(row["urgency"]))


_ALL_CODES: Final = 1000  # more than exist: HTTP_100 to HTTP_999 and two dozen names
_ATTEMPTS: Final = "attempts"
_FEW_BYTES: Final = 16 * 2**20
"""Of scorecards in a file; they are some 100 000 servers'."""


def find(spark: SparkSession, out: Place, as_of: date, computed: Computed) -> findings.Findings:
    """Return what the results in `out` say as of `as_of`; `computed` is what is noted of their days.

    Raises:
        FileNotFoundError: no run has written results of that day.
    """
    with few_rows(spark, when=size_of(results.read_dated(spark, out, results.SERVER_SCORECARD, as_of)) <= _FEW_BYTES):
        return _find(spark, out, as_of, computed)


def _find(spark: SparkSession, out: Place, as_of: date, computed: Computed) -> findings.Findings:
    wanted = [as_of - timedelta(days=back) for back in reversed(range(findings.DAYS))]
    scorecards = results.read_dated(spark, out, results.SERVER_SCORECARD, as_of)
    network = results.read_days(spark, out, results.NETWORK_SUMMARY, wanted).orderBy("day").collect()
    days = tuple(map(_day, network))
    codes = _error_totals(network)
    stored = results.read_days(spark, out, results.SERVER_DAILY, wanted)
    by_day = _by_day(stored)
    quarantine = _quarantine(
        results.read_days(spark, out, results.QUARANTINE, wanted).unionByName(
            results.read_undated(spark, out, results.QUARANTINE)
        )
    )
    found = verdicts.verdicts(scorecards).join(_last_attempts(stored), "server_url", "left").cache()
    try:
        counted, total = verdicts.counts(found), verdicts.totals(found)
        attention = verdicts.urgent(found)
        shown = {row["server_url"] for row in verdicts.with_days(attention)}
        relays = _relays(results.read_dated(spark, out, results.RELAY_CANDIDATES, as_of))
        anomalies = results.read_dated(spark, out, results.KEY_ANOMALIES, as_of)
        return findings.Findings(
            as_of=as_of,
            days=days,
            errors=_errors(network, codes),
            error_totals=codes,
            actions=verdicts.actions(counted),
            states=verdicts.states(counted),
            urgent_states=verdicts.states(row for row in counted if row["urgency"] > 1),
            attention=verdicts.servers_of(attention, days, _availability(stored, shown), shown=shown),
            changes=changes(spark, out, as_of, found),
            turnover=turnover(spark, out, as_of),
            obligations=verdicts.obligations(found, total, _owed_by_day(spark, out, as_of)),
            outages=verdicts.outages(found, total),
            relaying=_relaying(stored, [by_day.get(day.day) for day in days]),
            completeness=_completeness(computed, wanted, days, by_day.values(), quarantine),
            busiest=verdicts.busiest(found),
            week_attempts=total["week_attempts"],
            servers=verdicts.by_name(found),
            worst=verdicts.worst(found),
            latencies=tuple(total["latencies"]),
            scores=tuple(total["scores"]),
            relays=tuple(map(_relay, relays)),
            relay_count=_number(relays),
            anomalies=_anomalies(anomalies),
            anomaly_counts={row["kind"]: row["count"] for row in anomalies.groupBy("kind").count().collect()},
            quarantine=quarantine[: findings.MOST_QUARANTINE],
            quarantined=sum(each.rows for each in quarantine),
        )
    finally:
        found.unpersist()


def _by_day(daily: DataFrame) -> dict[date, Row]:
    """Return what was relayed and parked, by day."""
    sums = (sf.sum(value).alias(name) for name, value in (("relayed", _relayed()), ("parked", sf.col("parked"))))
    return {row["day"]: row for row in daily.groupBy("day").agg(*sums).collect()}


def _relayed() -> Column:
    """Return how many of a daily row's deliveries went through relays."""
    return sf.round(sf.col("delivered") * sf.coalesce("relayed_share", sf.lit(0.0))).cast("long")


def _relaying(daily: DataFrame, by_day: Sequence[Row | None]) -> findings.Relaying:
    sums = daily.groupBy("server_url").agg(sf.sum(_relayed()).alias("relayed"), sf.sum("delivered").alias("delivered"))
    saved, order = sums.where(sf.col("relayed") > 0), [sf.desc("relayed"), sf.col("server_url")]
    rows = verdicts.first_of(saved, sf.col("relayed") > 0, order, findings.MOST_RANKED)
    return findings.Relaying(
        daily=tuple(row["relayed"] if row else 0 for row in by_day),
        server_count=_number(rows),
        servers=tuple(
            findings.RelayedServer(url=row["server_url"], relayed=row["relayed"], delivered=row["delivered"])
            for row in rows
        ),
    )


def _completeness(
    computed: Computed,
    wanted: Sequence[date],
    days: Sequence[findings.Day],
    by_day: Iterable[Row],
    aside: Iterable[findings.SetAside],
) -> findings.Completeness:
    present = {day.day for day in days}
    return findings.Completeness(
        missing=tuple(day for day in wanted if day not in present),
        early=computed.early(sorted(present)),
        purged=computed.partly_purged(wanted),
        attempts=sum(day.attempts for day in days),
        parked=sum(row["parked"] for row in by_day),
        set_aside=sum(each.rows for each in aside if each.source == _ATTEMPTS),
    )


def _error_totals(network: Iterable[Row]) -> dict[str, int]:
    """Count failures by code, the most frequent first."""
    return verdicts.most_first(sum((Counter(row["errors"] or {}) for row in network), Counter[str]()))


def _errors(network: Sequence[Row], totals: Mapping[str, int]) -> tuple[findings.ErrorCode, ...]:
    daily = [row["errors"] or {} for row in network]
    return tuple(
        findings.ErrorCode(code=code, total=total, daily=tuple(errors.get(code, 0) for errors in daily))
        for code, total in list(totals.items())[: findings.MOST_CODES]
    )


def _availability(daily: DataFrame, urls: Iterable[str]) -> dict[tuple[str, date], float]:
    known = daily.where(sf.col("server_url").isin(sorted(urls)) & sf.col("availability").isNotNull())
    rows = known.select("server_url", "day", "availability").collect()
    return {(row["server_url"], row["day"]): row["availability"] for row in rows}


def _last_attempts(daily: DataFrame) -> DataFrame:
    """Return the last day on which something was sent to each server."""
    tried = daily.where(sf.col("attempts") > 0)
    return tried.groupBy("server_url").agg(sf.max("day").alias("last_attempt"))


def _owed_by_day(spark: SparkSession, out: Place, as_of: date) -> list[tuple[date, int, int]]:
    """Return what was owed, and of that held, as each of the results of 30 days has it."""
    days = [*_stored(out, as_of), as_of]
    cards = results.read_days(spark, out, results.SERVER_SCORECARD, days, ("as_of", "window_days", "owed", "held"))
    sums = cards.where(sf.col("window_days") == WEEK).groupBy("as_of")
    rows = sums.agg(*(sf.coalesce(sf.sum(name), sf.lit(0)) for name in ("owed", "held"))).orderBy("as_of")
    return [(day, owed, held) for day, owed, held in rows.collect()]


def _day(row: Row) -> findings.Day:
    known = {name: row[name] for name in findings.Day.__dataclass_fields__}
    # Days that an earlier version computed lack these.
    return findings.Day(**known | {"lost": row["lost"] or 0, "own_trouble": tuple(row["own_trouble"] or ())})


def _relays(candidates: DataFrame) -> list[Row]:
    columns: list[Column | str] = ["rank", sf.col("server_url").alias("url"), "score", "availability", "p95_ms"]
    rows = candidates.select(*columns, sf.unix_micros("last_seen").alias("last_seen"))
    order = [sf.col("rank"), sf.col("url")]
    return verdicts.first_of(rows, sf.col("rank") > 0, order, findings.MOST_RANKED)


def _relay(row: Row) -> findings.RelayFinding:
    known = {name: row[name] for name in findings.RelayFinding.__dataclass_fields__}
    return findings.RelayFinding(**known | {"last_seen": verdicts.instant_of(row["last_seen"])})


def _anomalies(anomalies: DataFrame) -> tuple[findings.Anomaly, ...]:
    shown = anomalies.select(
        "kind",
        "key_kind",
        "fingerprint",
        sf.slice("server_urls", 1, findings.MOST_URLS).alias("urls"),
        sf.size("server_urls").alias("servers"),
        sf.substring("detail", 1, 300).alias("detail"),
        "found_on",
    )
    rows = (
        shown.orderBy(sf.desc("servers"), "kind", "key_kind", "fingerprint", "urls")
        .limit(findings.MOST_ANOMALIES)
        .collect()
    )
    return tuple(findings.Anomaly(**row.asDict() | {"urls": tuple(row["urls"] or ())}) for row in rows)


def _quarantine(quarantine: DataFrame) -> tuple[findings.SetAside, ...]:
    counts = quarantine.groupBy("source", "reason").agg(sf.count("*").alias("rows"))
    rows = counts.orderBy(sf.desc("rows"), "source", "reason").limit(_ALL_CODES).collect()
    return tuple(findings.SetAside(**row.asDict()) for row in rows)
