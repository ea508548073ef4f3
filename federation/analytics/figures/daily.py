"""A server's day: what was attempted, how it ended, how long it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import AttemptOutcome
from federation.analytics.frames import SERVER_DAILY

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PERCENTILE_ACCURACY: Final = 1_000
"""The accuracy of `percentile_approx`: the rank of its result is at most 1/1000 of the group away from the right one.

A p95 lies between p94.9 and p95.1; groups of a few hundred are exact.
"""

_PERCENTILES: Final = (0.5, 0.95, 0.99)

SLOW_MS: Final = 5_000
"""A delivery that takes longer is slow."""


def server_daily(attempts: DataFrame) -> DataFrame:
    """Compute one row per server and UTC day with good attempts; see `SERVER_DAILY`.

    - attempts = delivered + retryable + permanent; what was parked was not attempted.
    - availability = delivered / attempts.
    - relayed share = relayed deliveries / delivered: the part of what arrived that did not go there directly.
    - p50, p95, p99 are of delivered attempts: how long a failure takes only reflects our deadline. See
      `PERCENTILE_ACCURACY`.

    There are two aggregations. The first is by result, and only its partial results are shuffled, so that if half of
    all traffic goes to one server, no single task does all that work. The second runs over the few results of a day.
    """
    by_result = attempts.groupBy("server_url", "day", "outcome", "error_code").agg(
        F.count("*").alias("rows"),
        F.count("relayed_by").alias("relayed"),
        F.sum("request_bytes").alias("request_bytes"),
        F.sum("response_bytes").alias("response_bytes"),
        latency_percentiles().alias("ms"),
        F.count_if(F.col("duration_ms") > SLOW_MS).alias("slow"),
    )
    attempted = F.col("outcome") != AttemptOutcome.PARKED.value
    code_counts = F.collect_list(F.when(attempted & F.col("error_code").isNotNull(), F.struct("error_code", "rows")))
    by_day = by_result.groupBy("server_url", "day").agg(
        *(_rows_of(outcome).alias(outcome.value) for outcome in AttemptOutcome),
        F.sum(F.when(attempted, F.col("rows")).otherwise(0)).alias("attempts"),
        F.map_from_entries(code_counts).alias("errors"),
        *(_of_delivered(name).alias(name) for name in ("relayed", "slow")),
        F.coalesce(F.sum("request_bytes"), F.lit(0)).alias("request_bytes"),
        F.coalesce(F.sum("response_bytes"), F.lit(0)).alias("response_bytes"),
        F.first("ms", ignorenulls=True).alias("ms"),  # only one result of a day has percentiles: delivered
    )
    return by_day.select(
        "*",
        share("relayed", "delivered").alias("relayed_share"),
        share("delivered", "attempts").alias("availability"),
        *(F.try_element_at("ms", F.lit(at)).alias(name) for at, name in enumerate(("p50_ms", "p95_ms", "p99_ms"), 1)),
    ).to(SERVER_DAILY)


def latency_percentiles() -> Column:
    """Return p50, p95 and p99 of the delivered attempts' durations as an array, or null if there are none."""
    duration = F.when(_is(AttemptOutcome.DELIVERED), F.col("duration_ms"))
    return F.percentile_approx(duration, list(_PERCENTILES), PERCENTILE_ACCURACY)


def share(part: str, whole: str) -> Column:
    """Return `part` / `whole`, or null if `whole` is nothing."""
    return F.when(F.col(whole) > 0, F.col(part) / F.col(whole))


def _is(outcome: AttemptOutcome) -> Column:
    return F.col("outcome") == outcome.value


def _of_delivered(count: str) -> Column:
    return F.sum(F.when(_is(AttemptOutcome.DELIVERED), F.col(count)).otherwise(0))


def _rows_of(outcome: AttemptOutcome) -> Column:
    return F.sum(F.when(_is(outcome), F.col("rows")).otherwise(0))
