"""Makes our Python data sources known to Spark."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark import cloudpickle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


def register_once(spark: SparkSession, source: type[DataSource], shipped: Sequence[str]) -> None:
    """Make Spark know the source in this session, and send the modules named `shipped` with its tasks."""
    registered = f"spark.federation.{source.name()}.registered"
    if spark.conf.get(registered, "") == "true":
        return
    for name in shipped:
        cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call] # it is not typed
    spark.dataSource.register(source)
    spark.conf.set(registered, "true")
