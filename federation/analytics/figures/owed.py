"""What is owed to each server, and what was lost for good: from the rows of deliveries, not from attempts.

A delivery is owed while it is ready or held. It is lost when it has failed or expired: then its row is kept for a week,
and what was written down when it was purged for a year. What an operator sends again is owed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import DeliveryState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LOST_STATES: Final = (DeliveryState.FAILED, DeliveryState.EXPIRED)


def owed_figures(windows: DataFrame, deliveries: DataFrame, losses: DataFrame) -> DataFrame:
    """Compute `owed`, `held`, `owed_since` and `lost` of each server and window.

    `windows` has `server_url`, `window_days`, `begins_at`, `ends_at`; `deliveries` and `losses` are checked ones. What
    is owed is so now, whichever window it is told with.
    """
    is_open = ~F.col("state").isin([state.value for state in LOST_STATES]) & F.col("settled_at").isNull()
    owed = (
        deliveries.where(is_open)
        .groupBy("server_url")
        .agg(
            F.count("*").alias("owed"),
            F.count_if(F.col("state") == DeliveryState.HELD.value).alias("held"),
            F.min("created_at").alias("owed_since"),
        )
    )
    given_up = deliveries.where(~is_open).select("id", "server_url", F.col("settled_at").alias("lost_at"))
    lost_at = given_up.unionByName(losses.select("id", "server_url", "lost_at")).dropDuplicates(["id"])
    inside = (F.col("lost_at") >= F.col("begins_at")) & (F.col("lost_at") < F.col("ends_at"))
    key = ["server_url", "window_days"]
    lost = windows.join(lost_at, "server_url").where(inside).groupBy(*key).agg(F.count("*").alias("lost"))
    counts = {name: F.coalesce(name, F.lit(0)) for name in ("owed", "held", "lost")}
    return windows.select(*key).join(owed, "server_url", "left").join(lost, key, "left").withColumns(counts)
