"""Attempts, counted in one reading: everything that is computed from attempts is computed from their tally.

A good attempt is counted with those of its server, day and code, which tells the outcome; delivered ones also by how
long they took, in whole milliseconds, so that percentiles are exact. An attempt that is set aside is counted with those
that equal it in every column, which are copies of one row. Only such counts are shuffled, so that if half of all
traffic goes to one server, no single task does all that work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import AttemptOutcome
from federation.analytics.figures.quarantine import as_json
from federation.analytics.frames import ATTEMPTS, QUARANTINE
from federation.codes import LOGGED_CODES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, GroupedData

_OF_GOOD: Final = ("server_url", "error_code", "relayed_by", "request_bytes", "response_bytes")


def tally(judged: DataFrame) -> DataFrame:
    """Count attempts that `check_attempts` has judged.

    The columns: `server_url`, `day`, `error_code`, `took_ms` (of delivered ones), `hour` (of failed ones); `reason` and
    `row` (of those set aside); `rows`, and what they come to: `relayed`, `request_bytes`, `response_bytes`.
    """
    is_good = F.col("reason").isNull()
    took = F.when(is_good & (F.col("outcome") == AttemptOutcome.DELIVERED.value), F.col("duration_ms"))
    hour = F.floor(F.pmod(F.unix_seconds("started_at"), F.lit(86_400)) / 3_600).cast("int")
    rows = judged.select(
        "day",
        "reason",
        *(F.when(is_good, F.col(name)).alias(name) for name in _OF_GOOD),
        took.alias("took_ms"),
        F.when(is_good & F.col("error_code").isNotNull(), hour).alias("hour"),
        F.when(~is_good, as_json(ATTEMPTS)).alias("row"),
    )
    return rows.groupBy("server_url", "day", "error_code", "took_ms", "hour", "reason", "row").agg(
        F.count("*").alias("rows"),
        F.count("relayed_by").alias("relayed"),
        F.sum("request_bytes").alias("request_bytes"),
        F.sum("response_bytes").alias("response_bytes"),
    )


def good(tallied: DataFrame) -> DataFrame:
    """Return the counts of good attempts, with their `outcome`."""
    code = F.col("error_code")
    outcome = F.when(code.isNull(), AttemptOutcome.DELIVERED.value)
    for each in (AttemptOutcome.PERMANENT, AttemptOutcome.PARKED):
        outcome = outcome.when(code.isin(sorted(LOGGED_CODES[each])), each.value)
    return tallied.where(F.col("reason").isNull()).withColumn(
        "outcome", outcome.otherwise(AttemptOutcome.RETRYABLE.value)
    )


def bad(tallied: DataFrame) -> DataFrame:
    """Return every attempt that was set aside, in the form of the quarantine."""
    rows = tallied.where(F.col("reason").isNotNull())
    return rows.select(
        F.lit("attempts").alias("source"), "reason", "day", "row", F.explode(F.sequence(F.lit(1).cast("long"), "rows"))
    ).to(QUARANTINE)


def ranked(counts: DataFrame, *key: str) -> GroupedData:
    """Group `counts` by their `key`, each with what `percentile` looks at: how many took as long at most, how many all.

    The counts of a key are sorted, not held: they may be more than fit into memory. They are sorted by a hash of the
    key first, as URLs that begin alike take long to compare, and grouped as they are sorted.
    """
    hashed = counts.repartition(*key).withColumn("_hash", F.xxhash64(*key))
    by_time = Over.partitionBy("_hash", *key).orderBy("took_ms")
    timed = F.sum(F.when(F.col("took_ms").isNotNull(), F.col("rows")).otherwise(0))
    return hashed.select(
        "*",
        timed.over(by_time.rowsBetween(Over.unboundedPreceding, Over.currentRow)).alias("_as_quick"),
        timed.over(by_time.rowsBetween(Over.unboundedPreceding, Over.unboundedFollowing)).alias("_timed"),
    ).groupBy("_hash", *key)


def percentile(percent: int) -> Column:
    """Return, of `ranked` counts, the shortest time that so many per cent did not exceed; null if nothing was timed."""
    return F.min(F.when(F.col("_as_quick") * 100 >= F.col("_timed") * percent, F.col("took_ms")))
