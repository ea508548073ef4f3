"""A server's day: what was attempted, how it ended, how long it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import AttemptOutcome
from federation.analytics.figures.tally import percentile, ranked
from federation.analytics.frames import SERVER_DAILY

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_PERCENTILES: Final = (50, 95, 99)

SLOW_MS: Final = 5_000
"""A delivery that takes longer is slow."""


def server_daily(counts: DataFrame) -> DataFrame:
    """Compute one row per server and UTC day from the counts of good attempts; see `SERVER_DAILY` and `tally`.

    - attempts = delivered + retryable + permanent; what was parked was not attempted.
    - availability = delivered / attempts.
    - relayed share = relayed deliveries / delivered: the part of what arrived that did not go there directly.
    - p50, p95, p99 are of delivered attempts, exactly: how long a failure takes only reflects our deadline.
    """
    attempted = F.col("outcome") != AttemptOutcome.PARKED.value
    is_failure = attempted & F.col("error_code").isNotNull()
    failed = F.collect_list(F.when(is_failure, F.struct("error_code", "hour", "rows")))
    by_day = ranked(counts, "server_url", "day").agg(
        *(_rows_of(outcome).alias(outcome.value) for outcome in AttemptOutcome),
        _sum_where(attempted, "rows").alias("attempts"),
        failed.alias("_failed"),
        _sum_where(_is(AttemptOutcome.DELIVERED), "relayed").alias("relayed"),
        _sum_where(F.col("took_ms") > SLOW_MS, "rows").alias("slow"),
        F.coalesce(F.sum("request_bytes"), F.lit(0)).alias("request_bytes"),
        F.coalesce(F.sum("response_bytes"), F.lit(0)).alias("response_bytes"),
        *(percentile(percent).alias(f"p{percent}_ms") for percent in _PERCENTILES),
    )
    return by_day.select(
        "*",
        _counts_by("error_code").alias("errors"),
        _counts_by("hour").alias("failed_hours"),
        share("relayed", "delivered").alias("relayed_share"),
        share("delivered", "attempts").alias("availability"),
    ).to(SERVER_DAILY)


def _counts_by(key: str) -> Column:
    """Add up the failures of each code, or of each hour; there are a few dozen at most."""

    def rows_of(value: Column) -> Column:
        alike = F.filter("_failed", lambda each: each[key] == value)
        total = F.aggregate(alike, F.lit(0).cast("long"), lambda sum_, each: sum_ + each["rows"])
        return F.coalesce(total, F.lit(0))  # which no count is, but Spark wants to see that none is null

    keys = F.array_distinct(F.transform("_failed", lambda each: each[key]))
    return F.map_from_arrays(keys, F.transform(keys, rows_of))


def share(part: str, whole: str) -> Column:
    """Return `part` / `whole`, or null if `whole` is nothing."""
    return F.when(F.col(whole) > 0, F.col(part) / F.col(whole))


def _is(outcome: AttemptOutcome) -> Column:
    return F.col("outcome") == outcome.value


def _sum_where(condition: Column, count: str) -> Column:
    return F.sum(F.when(condition, F.col(count)).otherwise(0))


def _rows_of(outcome: AttemptOutcome) -> Column:
    return _sum_where(_is(outcome), "rows")
