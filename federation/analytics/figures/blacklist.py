"""Who is on the blacklist: by a rule for its URL, or by one for a domain that it is in, as in the node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.servers.blacklist_rules import STAR

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def refused(servers: DataFrame, blacklist: DataFrame) -> DataFrame:
    """Return those of `servers` that a rule covers: `server_url`, `blacklisted_at`, `blacklist_reason`.

    Servers are looked up by their own names and the domains above, so that the work does not grow with the rules.
    """
    labels = F.split(F.lower(F.regexp_extract("server_url", r"^[A-Za-z]+://([^:/\[]+)", 1)), r"\.")
    domains = F.transform(
        F.sequence(F.lit(1), F.size(labels)),
        lambda place: F.concat(F.lit(STAR), F.array_join(F.slice(labels, place, F.size(labels)), ".")),
    )
    rules = blacklist.withColumnRenamed("server_url", "rule")
    covering = F.explode(F.array_append(domains, F.col("server_url")))
    return (
        servers.select("server_url", covering.alias("rule"))
        .join(rules, "rule")
        .groupBy("server_url")
        .agg(
            F.min("created_at").alias("blacklisted_at"),
            F.max_by("reason", "created_at").alias("blacklist_reason"),
            F.lit(True).alias("is_blacklisted"),
        )
    )
