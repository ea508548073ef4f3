"""How Spark gets to know our Python data sources, and what its workers need not do between two of their tasks.

Before each task they read the directory of every archive on their path again, and after each they collect garbage among
all that was ever imported. For reading a small table, that is nine tenths of their time (Python 3.11, Spark 4.1).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from zipimport import zipimporter

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MANY: Final = 10_000
"""More objects than tasks leave behind; imports do."""


def spare_worker() -> None:
    """Forget the archives until something is imported from them.

    What is imported now is exempt from garbage collection.
    """
    for place, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[place]
    # What is exempt already is not counted here: to count it would take as long as to look through it.
    if len(gc.get_objects(generation=2)) > _MANY:
        gc.freeze()


class SparesWorker:
    """A base class that speeds up the worker in which it is unpickled."""

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        spare_worker()


class OwnSource(SparesWorker, DataSource):
    """A data source of ours. Only Python workers make it."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        spare_worker()

    @classmethod
    def register(cls, spark: SparkSession, shipped: Sequence[str]) -> None:
        """Make Spark know the source in this session, and send this and the modules named `shipped` with its tasks."""
        registered = f"spark.federation.{cls.name()}.registered"
        if spark.conf.get(registered, "") == "true":
            return
        for name in (__name__, *shipped):
            cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call] # it is not typed
        spark.dataSource.register(cls)
        spark.conf.set(registered, "true")
