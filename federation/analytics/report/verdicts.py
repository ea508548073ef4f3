"""The verdict on each server, made of the scorecards of its two windows, and the lists that it is in."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Window as Over
from pyspark.sql import functions as sf

from db import ServerHealth
from federation.analytics.days import MONTH, WEEK, instant, midnight
from federation.analytics.frames import Action
from federation.analytics.report import findings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import date, datetime

    from pyspark.sql import Column, DataFrame, Row

URGENCY: Final = tuple(Action)
"""The actions; a verdict's `urgency` is the place of its own, from 1 on."""

_SERVER: Final = ("state", "top_error", "trend")
_PERIOD_COUNTS: Final = ("attempts", "delivered", "failures", "lost")


def verdicts(scorecards: DataFrame) -> DataFrame:
    """Return one row per server: both its windows, the verdict, which stands in both of its cards, and why."""
    urgency = urgency_of("action")
    reasons = sf.transform(sf.slice("reasons", 1, 5), lambda reason: sf.substring(reason, 1, 300))
    return scorecards.groupBy("server_url").agg(
        sf.max(urgency).alias("urgency"),
        sf.max_by(reasons, urgency).alias("reasons"),
        _of_window(WEEK, "week"),
        _of_window(MONTH, "month"),
        *(sf.min_by(name, "window_days").alias(name) for name in _SERVER),
        *(sf.coalesce(sf.max(name), sf.lit(0)).alias(name) for name in ("owed", "held")),
        *(sf.min_by(sf.unix_micros(name), "window_days").alias(name) for name in ("state_since", "owed_since")),
    )


def urgency_of(action: str) -> Column:
    return sf.array_position(sf.array(*(sf.lit(each.value) for each in URGENCY)), sf.col(action))


def action_of(urgency: int) -> Action:
    return URGENCY[max(urgency, 1) - 1]


def _of_window(days: int, name: str) -> Column:
    values = sf.struct(*findings.Period.__dataclass_fields__)
    return sf.first(sf.when(sf.col("window_days") == days, values), ignorenulls=True).alias(name)


def urgent(found: DataFrame) -> list[Row]:
    """Return those that need attention, the most urgent advice first, then what did not arrive; each list is cut short.

    What is owed to a server that is down is held, and makes no attempts: they tell less than what waits and was lost.
    """
    failed = sf.coalesce(sf.col("week.attempts") - sf.col("week.delivered"), sf.lit(0))
    order = (_missing().desc(), failed.desc(), "server_url")
    place = sf.row_number().over(Over.partitionBy("urgency").orderBy(*order))
    rows = (
        found.where(sf.col("urgency") > 1).withColumn("place", place).where(sf.col("place") <= findings.MOST_PER_ACTION)
    )
    return rows.orderBy(sf.desc("urgency"), "place").collect()


def first_of(rows: DataFrame, group: Column, order: Sequence[Column], limit: int) -> list[Row]:
    """Return the first rows of each group, in their order, each with `number`: how many the group has."""
    groups = Over.partitionBy(group)
    placed = rows.withColumns(
        {"place": sf.row_number().over(groups.orderBy(*order)), "number": sf.count("*").over(groups)}
    )
    return placed.where(sf.col("place") <= limit).orderBy("place").collect()


def with_days(rows: Iterable[Row]) -> list[Row]:
    """Return the first of each list of `urgent`, which are shown with their days."""
    return [row for row in rows if row["place"] <= findings.MOST_WITH_DAYS]


def worst(found: DataFrame) -> tuple[findings.Server, ...]:
    """Return the servers that are worst by their advice, then by their score."""
    traffic = sf.col("month.attempts")
    known = found.where(
        sf.col("month.score").isNotNull() & (traffic >= findings.FEWEST_ATTEMPTS) | (sf.col("urgency") > 1)
    )
    order = (sf.desc("urgency"), sf.asc("month.score"), _missing().desc(), traffic.desc(), "server_url")
    return _listed(known.orderBy(*order))


def by_name(found: DataFrame) -> tuple[findings.Server, ...]:
    """Return the servers in the order of their names."""
    return _listed(found.orderBy("server_url"), findings.MOST_LISTED)


def _missing() -> Column:
    """Return how many deliveries have not arrived: owed, or lost for good in 30 days."""
    return sf.col("owed") + _number("month.lost")


def totals(found: DataFrame) -> Row:
    """Add up what there is of all servers, and count them by how quick and how reliable they are."""
    week, month, failures = (_number(name) for name in ("week.lost", "month.lost", "month.failures"))
    known = {name: _number(name) for name in ("owed", "held")} | {"week_attempts": _number("week.attempts")}
    latency, score = sf.col("week.p95_ms"), sf.col("month.score")
    sums = known | {"lost_week": week, "lost_month": month, "failures": failures}
    return found.agg(
        *(sf.coalesce(sf.sum(each), sf.lit(0)).alias(name) for name, each in sums.items()),
        sf.min("owed_since").alias("since"),
        sf.count_if(sf.col("owed") > 0).alias("owed_servers"),
        sf.count_if(month > 0).alias("lost_servers"),
        sf.count_if(failures > 0).alias("failed_servers"),
        sf.median("month.mttf_s").alias("mttf_s"),
        sf.median("month.mttr_s").alias("mttr_s"),
        _spread("week.p95_ms", [latency > bound for bound in findings.LATENCY_BOUNDS_MS]).alias("latencies"),
        _spread("month.score", [score >= bound for bound in findings.SCORE_BOUNDS]).alias("scores"),
    ).collect()[0]


def busiest(found: DataFrame) -> tuple[findings.Server, ...]:
    """Return the servers with the most attempts in 7 days."""
    tried = found.where(sf.col("week.attempts") > 0)
    return _listed(tried.orderBy(sf.desc("week.attempts"), "server_url"))


def obligations(found: DataFrame, total: Row, history: Sequence[tuple[date, int, int]]) -> findings.Obligations:
    """Return what is owed and lost in all, what was owed on earlier days, and the servers with the most of it."""
    lost = _number("month.lost")
    most = found.where(_missing() > 0).orderBy(_missing().desc(), lost.desc(), "server_url")
    known = _known(total, findings.Obligations) | {"since": instant_of(total["since"])}
    by_code = found.select(sf.explode("month.loss_codes").alias("code", "lost")).groupBy("code")
    codes = by_code.agg(sf.sum("lost").alias("lost")).orderBy(sf.desc("lost"), "code").limit(findings.MOST_LOSS_CODES)
    return findings.Obligations(
        **known, loss_codes=dict(codes.collect()), servers=_listed(most), history=tuple(history)
    )


def outages(found: DataFrame, total: Row) -> findings.Outages:
    """Return the outages of 30 days in all, and the servers with the most of them, or with one that began earlier."""
    failures = _number("month.failures")
    most = found.where(sf.col("month.longest_outage_s") > 0).orderBy(
        failures.desc(), sf.desc("month.longest_outage_s"), "server_url"
    )
    return findings.Outages(**_known(total, findings.Outages), servers=_listed(most))


def _known(total: Row, made: type[findings.Obligations | findings.Outages]) -> dict[str, Any]:
    return {name: total[name] for name in made.__dataclass_fields__ if name in total}


def instant_of(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else instant(microseconds)


def _number(name: str) -> Column:
    return sf.coalesce(sf.col(name), sf.lit(0))


def counts(found: DataFrame) -> list[Row]:
    """Count the servers by advice and state."""
    state = sf.coalesce("state", sf.lit("")).alias("state")
    return found.groupBy("urgency", state).count().orderBy("state").collect()


def actions(counted: Sequence[Row]) -> dict[Action, int]:
    """Return how many servers have each advice, the most urgent first."""
    places = reversed(list(enumerate(URGENCY, start=1)))
    return {action: sum(row["count"] for row in counted if row["urgency"] == place) for place, action in places}


def states(counted: Iterable[Row]) -> dict[str, int]:
    """Return how many servers are in each state."""
    found = Counter[str]()
    for row in counted:
        found[row["state"]] += row["count"]
    return dict(found)


def _spread(value: str, above: Sequence[Column]) -> Column:
    """Count the servers between two bounds, by how many of the bounds they are `above`."""
    passed = sum((sf.when(each, 1).otherwise(0) for each in above), start=sf.lit(0))
    is_known = sf.col(value).isNotNull()
    return sf.array(*(sf.count_if(is_known & (passed == number)) for number in range(len(above) + 1)))


def servers_of(
    rows: Iterable[Row],
    days: Sequence[findings.Day],
    availability: Mapping[tuple[str, date], float],
    *,
    shown: set[str],
) -> tuple[findings.Server, ...]:
    """Return the servers of the rows, those of `shown` with their days."""

    def server(row: Row) -> findings.Server:
        url = row["server_url"]
        daily = tuple(availability.get((url, each.day)) for each in days) if url in shown else ()
        return _server(row, days, daily)

    return tuple(map(server, rows))


def _listed(ordered: DataFrame, limit: int = findings.MOST_RANKED) -> tuple[findings.Server, ...]:
    return tuple(_server(row, (), ()) for row in ordered.limit(limit).collect())


def _server(row: Row, days: Sequence[findings.Day], daily: tuple[float | None, ...]) -> findings.Server:
    sick_since = row["state_since"] if row["state"] == ServerHealth.UNHEALTHY else None
    first_bad_day = _first_bad_day(days, daily) if daily else None
    return findings.Server(
        url=row["server_url"],
        action=action_of(row["urgency"]),
        state=row["state"],
        reasons=tuple(row["reasons"] or ()),
        since=findings.Since(at=instant(sick_since)) if sick_since is not None else first_bad_day,
        top_error=row["top_error"],
        trend=row["trend"],
        week=_period(row["week"]),
        month=_period(row["month"]),
        owed=row["owed"],
        held=row["held"],
        owed_since=instant_of(row["owed_since"]),
        last_attempt=row["last_attempt"],
        daily=daily,
    )


def _first_bad_day(days: Sequence[findings.Day], daily: Sequence[float | None]) -> findings.Since | None:
    """Return where the bad days begin that last until now, or None if the last day was good.

    Days without attempts are ignored.
    """
    known = [(day.day, ratio) for day, ratio in zip(days, daily, strict=True) if ratio is not None]
    bad = list(takewhile(lambda each: each[1] < findings.BAD_DAY, reversed(known)))
    return findings.Since(at=midnight(bad[-1][0]), at_least=len(bad) == len(known)) if bad else None


def _period(row: Row | None) -> findings.Period:
    if row is None:
        return findings.Period()
    counts: dict[str, Any] = {name: row[name] or 0 for name in _PERIOD_COUNTS}
    return findings.Period(**row.asDict() | counts | {"loss_codes": most_first(row["loss_codes"] or {})})


def most_first(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts, the greatest first."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
