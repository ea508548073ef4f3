"""All attempts, counted in one reading: percentiles, and ids that are there a million times."""

from __future__ import annotations

from typing import Final

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import AttemptOutcome
from federation.analytics.figures.checks import check_attempts
from federation.analytics.figures.tally import bad, good, percentile, ranked, tally
from federation.analytics.frames import ATTEMPTS
from federation.codes import LOGGED_CODES
from tests.federation.analytics.rows import NOW, WINDOW, attempt, failure, frame

PERCENTS: Final = (50, 51, 95, 96, 99, 100)
COUNTS: Final = "('a', 100, 50L), ('a', 200, 45L), ('a', 300, 4L), ('a', 400, 1L), ('a', NULL, 1000L), ('b', NULL, 1L)"


def test_percentiles_are_those_of_all_rows(spark: SparkSession) -> None:
    """The shortest time that so many per cent did not exceed; what was not timed does not count."""
    counts = spark.sql(f"SELECT * FROM VALUES {COUNTS} AS (key, took_ms, rows)")
    found = ranked(counts, "key").agg(*map(percentile, PERCENTS)).collect()
    assert {row["key"]: tuple(row[2:]) for row in found} == {"a": (100, 200, 200, 300, 300, 400), "b": (None,) * 6}


@pytest.mark.parametrize("took", ["100", "cast(number AS int)"], ids=["equal", "different"])
def test_an_id_that_is_there_a_million_times_counts_once(spark: SparkSession, took: str, full: bool) -> None:
    """All other copies are set aside, each as a row."""
    copies = 1_000_000 if full else 20_000
    one = frame(spark, ATTEMPTS, [attempt(id=7)])
    rows = (
        spark.range(100, 100 + copies)
        .withColumnRenamed("id", "number")
        .join(one)
        .withColumn("duration_ms", F.expr(took))
    )
    tallied = tally(check_attempts(rows, window=WINDOW, now=NOW)).persist()
    try:
        [row] = good(tallied).collect()
        assert (row["rows"], row["took_ms"]) == (1, 100)
        reasons = bad(tallied).groupBy("reason").count().collect()
        assert [(row["reason"], row["count"]) for row in reasons] == [("duplicated id", copies - 1)]
    finally:
        tallied.unpersist()


@pytest.mark.parametrize("outcome", AttemptOutcome)
def test_the_code_tells_the_outcome(spark: SparkSession, outcome: AttemptOutcome) -> None:
    """Attempts are counted by their code alone."""
    codes = [None] if outcome is AttemptOutcome.DELIVERED else sorted(LOGGED_CODES[outcome])
    rows = [attempt(outcome=outcome.value, error_code=code) for code in codes]
    if outcome is AttemptOutcome.RETRYABLE:
        codes.append("HTTP_503")
        rows.append(failure("https://a.example", "HTTP_503", http_status=503))
    counts = good(tally(check_attempts(frame(spark, ATTEMPTS, rows), window=WINDOW, now=NOW))).collect()
    assert {(row["error_code"], row["outcome"]) for row in counts} == {(code, outcome.value) for code in codes}
