"""Made-up attempts: see `generate`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program gives it

from federation.analytics.days import utc_day
from scripts.made_up.servers import DAY_US, url_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from scripts.made_up.servers import History

ROWS_PER_TASK: Final = 500_000

_BUSIEST: Final = 0.6
"""When the day's traffic peaks, at 2.6 times that of its quietest moment, as a share of the day: 14:24 UTC."""


def make_attempts(spark: SparkSession, history: History, servers: DataFrame) -> DataFrame:
    """Make ATTEMPTS and the `day` of each."""
    tasks = max(spark.sparkContext.defaultParallelism, -(-history.attempts // ROWS_PER_TASK))
    rows = spark.range(1, history.attempts + 1, 1, tasks)
    chosen = rows.select("id", _moment_us(history).alias("us"), _server(history).alias("server"))
    known = chosen.join(F.broadcast(servers.drop("kind")), "server", "left")
    during = F.filter("outages", lambda outage: (outage.start <= F.col("us")) & (F.col("us") < outage.end))
    known = known.withColumn("down", F.get(during, F.lit(0))["code"])
    chances = {name: history.chance(name) for name in ("luck", "what", "relay", "size", "kind")}
    known = known.select("*", *(chance.alias(name) for name, chance in chances.items()))
    known = known.withColumn("error_code", _error_code())
    relayed = F.col("relay") < F.when(F.col("down") == "DNS_BLOCKED", 0.6).otherwise(0.02)
    known = known.withColumn("relayed", relayed & ~F.col("blacklisted") & (F.col("luck") >= 0.002))
    # A relay gets through even if we do not.
    known = known.withColumn("error_code", F.when(~F.col("relayed") | F.col("down").isNull(), F.col("error_code")))
    return known.select(*_columns(history))


def _moment_us(history: History) -> Column:
    """Return a time that rises with the number, and is denser where the cycles peak."""
    passed = (F.col("id") - 1 + history.chance("moment")) / history.attempts * history.days
    in_weeks = _cycle(passed / 7, 0.2, 0.35) * 7
    whole_ones, rest = divmod(history.days / 7, 1)
    all_of_it = 7 * (whole_ones + _cycle_of(rest, 0.2, 0.35))
    days = in_weeks * (history.days / all_of_it)
    return (F.lit(history.begins_us) + _cycle(days, 0.45, _BUSIEST) * DAY_US).cast("long")


def _cycle(passed: Column, strength: float, height: float) -> Column:
    """Map each whole period onto itself, denser around `height` (a share of it)."""
    phase = math.pi - 2 * math.pi * height
    return passed + strength / (2 * math.pi) * (F.sin(2 * math.pi * passed + phase) - math.sin(phase))


def _cycle_of(passed: float, strength: float, height: float) -> float:
    phase = math.pi - 2 * math.pi * height
    return passed + strength / (2 * math.pi) * (math.sin(2 * math.pi * passed + phase) - math.sin(phase))


def _server(history: History) -> Column:
    by_rank = (
        F.least(F.floor(F.pow(F.lit(float(history.servers)), history.chance("server"))), F.lit(history.servers)) - 1
    )
    unknown = F.lit(history.servers) + F.floor(history.chance("unknown") * 5)
    other = F.when(history.chance("is unknown") < 0.0005, unknown).otherwise(by_rank)
    return F.when(history.chance("hot") < history.hot_share, F.lit(0)).otherwise(other).cast("long")


def _error_code() -> Column:
    passing = _one_of("what", "TIMEOUT", "HTTP_500", "CONN_RESET", "HTTP_429")
    final = F.when(F.col("server") % 97 == 31, "INVALID_ACK").otherwise(
        _one_of("what", "NO_ACK", "NOT_JSON", "INVALID_PAYLOAD")
    )
    return (
        F.when(F.col("url").isNull(), "DISCOVERY")
        .when(F.col("blacklisted"), "BLACKLISTED")
        .when(F.col("luck") < 0.002, "PARKED")
        .when(F.col("down").isNotNull(), F.col("down"))
        .when(F.col("luck") < 0.002 + F.col("failing"), passing)
        .when(F.col("luck") < 0.0025 + F.col("failing"), final)
    )


def _one_of(chance: str, *values: str) -> Column:
    return F.array(*map(F.lit, values))[F.floor(F.col(chance) * len(values)).cast("int")]


def _columns(history: History) -> list[Column]:
    code, odd = F.col("error_code"), F.col("id") % 50_021
    answered = code.isin("NO_ACK", "NOT_JSON", "INVALID_ACK")
    final = answered | code.isin("BLACKLISTED", "INVALID_PAYLOAD")
    outcome = (
        F.when(code.isNull(), "delivered")
        .when(code == "PARKED", "parked")
        .when(final, "permanent")
        .otherwise("retryable")
    )
    status = F.when(code.isNull() | answered, 200).when(code.startswith("HTTP_"), F.substring(code, 6, 3).cast("int"))
    unsent = code.isin("CONN_REFUSED", "DNS_BLOCKED", "DISCOVERY", "PARKED", "BLACKLISTED", "INVALID_PAYLOAD")
    job = F.when(F.col("kind") < 0.85, "post").when(F.col("kind") < 0.95, "follow").otherwise("unfollow")
    method = F.when(job == "post", "FEDERATE_POST").when(job == "follow", "FEDERATE").otherwise("UNFOLLOW")
    digest = F.md5(F.concat_ws(" ", F.lit(history.seed), F.col("id")))
    parts = [F.substring(digest, start, length) for start, length in ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))]
    unknown_url = F.concat(
        F.lit("https://unknown"), (F.col("server") - history.servers).cast("string"), F.lit(".example")
    )
    relay = url_of(F.floor(F.col("size") * min(20, history.servers)))
    again = F.floor(F.col("what") * 5) + 1
    return [
        F.col("id"),
        F.concat_ws("-", *parts).alias("delivery_id"),
        F.concat(F.lit("deliver-"), job).alias("job_name"),
        method.alias("method"),
        F.when(odd == 9, "s9.example").otherwise(F.coalesce("url", unknown_url)).alias("server_url"),
        F.when(F.col("down").isNull(), 1).otherwise(again).cast("int").alias("attempt"),
        F.timestamp_micros("us").alias("started_at"),
        F.when(odd == 7, -1).otherwise(_duration_ms(history)).cast("int").alias("duration_ms"),
        outcome.alias("outcome"),
        F.when((odd == 8) & code.isNotNull(), "E_ODD").otherwise(code).alias("error_code"),
        status.alias("http_status"),
        F.when(F.col("relayed"), relay).alias("relayed_by"),
        F.when(F.coalesce(~unsent, F.lit(True)), (900 + 1500 * F.col("size")).cast("int")).alias("request_bytes"),
        F.when(status.isNotNull(), (250 + 200 * F.col("relay")).cast("int")).alias("response_bytes"),
        F.lit(None).cast("string").alias("unreadable"),
        utc_day(F.timestamp_micros("us")).alias("day"),
    ]


def _duration_ms(history: History) -> Column:
    """Return a duration that is log-normal around the server's own latency; a timeout takes the whole deadline."""
    normal = F.sqrt(-2 * F.log(1 - history.chance("normal"))) * F.cos(2 * math.pi * history.chance("angle"))
    answered = F.least(F.coalesce("latency_ms", F.lit(100.0)) * F.exp(0.45 * normal) + 2, F.lit(14_999))
    code = F.col("error_code")
    return (
        F.when(code == "TIMEOUT", 15_000)
        .when(code.isin("PARKED", "BLACKLISTED", "INVALID_PAYLOAD"), 1)
        .otherwise(answered)
    )
