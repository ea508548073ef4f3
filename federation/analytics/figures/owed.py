"""What is owed to each server, and what was lost, from rows of deliveries, not attempts.

A delivery is owed while it is ready or held. It is lost when it has failed or expired: then its row is kept for a week,
and what was written down when it was purged for a year. What an operator sends again is owed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import DeliveryState

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_LOST_STATES: Final = (DeliveryState.FAILED, DeliveryState.EXPIRED)


def still_open(deliveries: DataFrame) -> DataFrame:
    """Return the deliveries that are owed."""
    return deliveries.where(_is_open())


def lost_deliveries(deliveries: DataFrame, losses: DataFrame) -> DataFrame:
    """Return what was given up, each once: `id`, `server_url`, `state`, `code`, `lost_at`.

    The code is that of the last attempt. Of what was never attempted, the state says why it was given up.
    """
    given_up = deliveries.where(~_is_open()).withColumnRenamed("settled_at", "lost_at")
    columns = ("id", "server_url", "state", F.coalesce("error_code", "state").alias("code"), "lost_at")
    return given_up.select(*columns).unionByName(losses.select(*columns)).dropDuplicates(["id"])


def owed_figures(windows: DataFrame, deliveries: DataFrame, losses: DataFrame) -> DataFrame:
    """Compute `owed`, `held`, `owed_since`, `lost`, `loss_codes` and `lost_later` of each server and window.

    `windows` has `server_url`, `window_days`, `begins_at`, `later_at` (of its later half), `ends_at`; `deliveries` and
    `losses` are checked ones. What is owed is so now, whichever window it is told with.
    """
    owed = (
        still_open(deliveries)
        .groupBy("server_url")
        .agg(
            F.count("*").alias("owed"),
            F.count_if(F.col("state") == DeliveryState.HELD.value).alias("held"),
            F.min("created_at").alias("owed_since"),
        )
    )
    inside = (F.col("lost_at") >= F.col("begins_at")) & (F.col("lost_at") < F.col("ends_at"))
    key = ["server_url", "window_days"]
    gone = windows.join(lost_deliveries(deliveries, losses), "server_url").where(inside)
    by_code = gone.groupBy(*key, "code").agg(
        F.count("*").alias("lost"), F.count_if(F.col("lost_at") >= F.col("later_at")).alias("later")
    )
    lost = by_code.groupBy(*key).agg(
        F.sum("lost").alias("lost"),
        F.sum("later").alias("lost_later"),
        F.map_from_entries(F.collect_list(F.struct("code", "lost"))).alias("loss_codes"),
        F.max_by("code", F.struct("lost", "code")).alias("top_loss"),
    )
    counts = {name: F.coalesce(name, F.lit(0)) for name in ("owed", "held", "lost", "lost_later")}
    return windows.select(*key).join(owed, "server_url", "left").join(lost, key, "left").withColumns(counts)


def _is_open() -> Column:
    return ~F.col("state").isin([state.value for state in _LOST_STATES]) & F.col("settled_at").isNull()
