"""The application's tables as the Spark data source `federation`, read in parallel through SQLAlchemy.

Options: `url` and `table`, which are required; `since` and `until` (ISO days or times, UTC, the end not included) for
tables with a time; `partitions`, the greatest number of tasks that share the read, which otherwise goes by the table's
size. Spark asks a Python source for all
columns of its schema: name fewer with `.schema(...)`, and only those are selected.

The modules of ours that this one needs travel to the executors with it; these need sqlalchemy, pyarrow and, for
PostgreSQL, psycopg installed. Spark shows neither the option `url` nor a partition's read in its plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import StructType

from federation.analytics.data.python_workers import OwnSource
from federation.analytics.data.tables import TABLES, TableReader, table_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SHIPPED: Final = (
    "db.engines",
    "db.poolers",
    "db.url",
    "federation.analytics.data.arrow_columns",
    "federation.analytics.data.pushdown",
    "federation.analytics.data.tables",
    __name__,
)


class FederationSource(OwnSource):
    """One table of the application's database."""

    @classmethod
    def name(cls) -> str:
        return "federation"

    def schema(self) -> StructType:
        return table_of(self.options).schema

    def reader(self, schema: StructType) -> TableReader:
        """Return a reader of the columns of `schema` only.

        Raises:
            ValueError: this source does not know an option or a column.
        """
        return TableReader(self.options, schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTables:
    """The tables of one database, for `export`: read in parallel through SQLAlchemy."""

    spark: SparkSession
    url: str
    partitions: int | None = None

    def read(self, table: str, *, since: datetime | None = None, until: datetime | None = None) -> DataFrame:
        """Read the table as `read_table` does."""
        register(self.spark)
        return read_table(self.spark, self.url, table, since=since, until=until, partitions=self.partitions)


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("federation")` work in this session."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    FederationSource.register(spark, _SHIPPED)


def read_table(
    spark: SparkSession,
    url: str,
    table: str,
    *,
    columns: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    partitions: int | None = None,
) -> DataFrame:
    """Read the rows of the table from `since` to `until` (aware), as a frame.

    It has the table's schema in `frames`, or the given `columns` of it.
    """
    schema = TABLES[table].schema
    if columns is not None:
        schema = StructType([schema[name] for name in columns])
    options = {"url": url, "table": table}
    if partitions is not None:
        options["partitions"] = str(partitions)
    bounds = {name: moment.isoformat() for name, moment in (("since", since), ("until", until)) if moment is not None}
    return spark.read.format("federation").options(**options, **bounds).schema(schema).load()
