"""Made-up servers, their outages, health events and keys: see `generate`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program gives it

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

DAY_US: Final = 86_400_000_000

_CODES: Final = ("CONN_REFUSED", "TIMEOUT", "HTTP_503", "DNS_BLOCKED", "TLS_ERROR", "HTTP_502", "CONN_RESET")
_MOST_OUTAGES: Final = 10
_LONGEST: Final = {"sick": 0.45, "flaky": 0.05, "sound": 0.01}
"""The longest outage, as a share of the time that there is for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What to make: `days` up to and including the day before `until`."""

    attempts: int
    servers: int
    days: int
    until: date
    seed: int = 0
    hot_share: float = 0.0
    """The share of the first server in all attempts, beyond what Zipf's law gives it."""

    def __post_init__(self) -> None:
        if self.attempts < 0 or self.servers < 1 or self.days < 1 or not 0 <= self.hot_share <= 1:
            raise ValueError("attempts must not be negative, servers and days at least 1, the hot share 0 to 1")

    @property
    def begins_us(self) -> int:
        """The beginning, in microseconds since 1970, like all `_us`."""
        first = datetime.combine(self.until - timedelta(days=self.days), time(), UTC)
        return int(first.timestamp()) * 1_000_000

    @property
    def ends_us(self) -> int:
        return self.begins_us + self.days * DAY_US

    def chance(self, salt: str, *keys: Column) -> Column:
        """Return a uniform value from 0 to 1 (excluded), computed from `keys`, by default the column `id`.

        Each salt gives another value.
        """
        bits = F.xxhash64(*(keys or (F.col("id"),)), F.lit(f"{self.seed} {salt}"))
        return F.shiftrightunsigned(bits, 11) / F.lit(float(2**53))


def url_of(number: Column) -> Column:
    return F.concat(F.lit("https://s"), F.lpad(number.cast("string"), 6, "0"), F.lit(".example"))


def make_servers(spark: SparkSession, history: History) -> DataFrame:
    """Make one row per server: `server` (its number), what it is like, and its `outages`, which do not overlap."""
    number = F.col("server")

    def chance(salt: str) -> Column:
        return history.chance(salt, number)

    kind = (
        # The busiest are sound, except for one: a network is not half down, but some popular server always is.
        F.when(number == 2, "sick")
        .when(number < 6, "sound")
        .when(chance("kind") < 0.015, "dead")
        .when(chance("kind") < 0.045, "sick")
        .when(chance("kind") < 0.150, "flaky")
        .otherwise("sound")
    )
    count = (
        F.when(F.col("kind") == "sick", 4 + F.floor(chance("outages") * 6))
        .when(F.col("kind") == "flaky", 1 + F.floor(chance("outages") * 5))
        .when((F.col("kind") == "dead") | (chance("outages") < 0.2), 1)
        .otherwise(0)
    )
    described = spark.range(history.servers).select(F.col("id").alias("server")).withColumn("kind", kind)
    described = described.withColumn("count", count.cast("int"))
    places = F.slice(F.sequence(F.lit(0), F.lit(_MOST_OUTAGES)), F.lit(1), F.col("count"))
    return described.select(
        "server",
        F.transform(places, lambda place: _outage(history, place)).alias("outages"),
        url_of(number).alias("url"),
        (15 * F.exp(3.2 * chance("latency"))).alias("latency_ms"),
        F.when(F.col("kind") == "flaky", 0.05).when(F.col("kind") == "sick", 0.02).otherwise(0.004).alias("failing"),
        ((chance("blacklisted") < 0.005) & (number > 28)).alias("blacklisted"),
    )


def _outage(history: History, place: Column) -> Column:
    """Return the outage in that place: the time is divided evenly among a server's outages.

    A dead server's has no end.
    """
    keys = (F.col("server"), place)
    codes = F.array(*map(F.lit, _CODES))
    slot = F.lit(float(history.days * DAY_US)) / F.col("count")
    start = F.lit(history.begins_us) + slot * (place + 0.5 * history.chance("start", *keys))
    longest = F.lit(None).cast("double")
    for kind, share in _LONGEST.items():
        longest = F.when(F.col("kind") == kind, share).otherwise(longest)
    end = start + slot * longest * (0.05 + 0.95 * history.chance("end", *keys))
    return F.struct(
        start.cast("long").alias("start"),
        F.coalesce(end.cast("long"), F.lit(2 * history.ends_us)).alias("end"),
        codes[F.floor(history.chance("code", *keys) * len(_CODES)).cast("int")].alias("code"),
    )


def make_health_events(servers: DataFrame, history: History) -> DataFrame:
    """Make HEALTH_EVENTS: an outage is noticed within five minutes, and its end within ten."""
    outages = servers.select("server", "url", F.posexplode("outages").alias("place", "outage")).select("*", "outage.*")

    def event(before: str, after: str, reason: Column, moment: Column) -> DataFrame:
        at = F.timestamp_micros(moment.cast("long"))
        states = (F.lit(before).alias("from_state"), F.lit(after).alias("to_state"))
        return outages.select(F.col("url").alias("server_url"), *states, reason.alias("reason"), at.alias("at"))

    def delay(salt: str, most_s: int) -> Column:
        return 1_000_000 * (1 + most_s * history.chance(salt, F.col("server"), F.col("place")))

    begun = event("healthy", "unhealthy", F.col("code"), F.col("start") + delay("noticed", 299))
    ended = event("unhealthy", "healthy", F.lit("probe"), F.col("end") + delay("healed", 599))
    until = F.timestamp_micros(F.lit(history.ends_us))
    number = F.row_number().over(Over.orderBy("at", "server_url", "to_state")).cast("long")
    return begun.union(ended).where(F.col("at") < until).select(number.alias("id"), "*")


def make_registry(servers: DataFrame, history: History, *, earlier: bool = False) -> DataFrame:
    """Make SERVERS as they are at the end, or as an earlier run saw them, when two had other keys."""
    number = F.col("server")
    end = F.lit(history.ends_us)
    open_ones = F.filter("outages", lambda outage: (outage.start < end) & (outage.end >= end))
    down = F.get(open_ones, F.lit(0))
    seen = F.coalesce(down["start"], end - 3_600_000_000 * history.chance("seen", number))
    age = F.when(history.chance("age", number) < 0.03, history.days).otherwise(history.days + 300)
    created = end - DAY_US * age * history.chance("created", number)
    identity = F.md5(F.concat_ws(" ", F.lit(history.seed), F.lit("server"), number))
    registry = servers.select(
        identity.alias("id"),
        "url",
        _key(history, "signing", earlier=earlier).alias("public_key"),
        _key(history, "encryption", earlier=earlier).alias("encryption_public_key"),
        F.timestamp_micros(F.greatest(seen, created).cast("long")).alias("last_seen"),
        F.timestamp_micros(created.cast("long")).alias("created_at"),
        F.timestamp_micros(F.greatest(seen, created).cast("long")).alias("updated_at"),
        down.isNull().alias("is_healthy"),
        F.when(down.isNull(), 0).otherwise(5).alias("health_check_attempts"),
        down["code"].alias("unhealthy_reason"),
    )
    return registry.where(F.col("created_at") < F.timestamp_micros(end - DAY_US)) if earlier else registry


def _key(history: History, kind: str, *, earlier: bool) -> Column:
    """Return base64 of 32 bytes, except for a few servers.

    7 and 11 have the signing key of 3; 13 and 17 have malformed keys.
    """
    number = F.col("server")
    owner = F.when(number.isin(7, 11) & F.lit(kind == "signing"), 3).otherwise(number)
    generation = F.when(number.isin(19, 23) & F.lit(earlier), "old ").otherwise("")
    text = F.concat(F.lit(f"{history.seed} {kind} "), generation, owner.cast("string"))
    sound = F.base64(F.unhex(F.sha2(text, 256)))
    short = F.base64(F.unhex(F.substring(F.sha2(text, 256), 1, 62)))
    return F.when(number == 13, "not-a-key").when(number == 17, short).otherwise(sound)


def make_blacklist(servers: DataFrame, history: History) -> DataFrame:
    """Make BLACKLIST, with about one server in 200."""
    at = F.lit(history.begins_us) - DAY_US * history.chance("listed", F.col("server"))
    return servers.where("blacklisted").select(
        F.md5(F.concat_ws(" ", F.lit(history.seed), F.lit("listed"), "server")).alias("id"),
        F.col("url").alias("server_url"),
        F.timestamp_micros(at.cast("long")).alias("created_at"),
        F.lit("spam").alias("reason"),
    )
