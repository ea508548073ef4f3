"""Parquet files in a store of which Spark's Hadoop has the file system: Spark reads and writes them itself.

Of what a query does not need, it reads nothing. How many rows a file has is counted by tasks, from its footer: the
driver opens none.
"""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf
from pyspark.sql.types import LongType, StructType

from federation.analytics.data.store_urls import S3A, StoreUrl
from federation.analytics.data.stored_files import UNKNOWN, DataFile
from federation.analytics.errors import StoreUnusable
from federation.analytics.jvm import has_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

_PATTERN: Final = re.compile(r"[\\*?\[\]{}]")
_UNDATED: Final = "__HIVE_DEFAULT_PARTITION__"


def literal(path: str) -> str:
    """Return the path as Spark has to read it: by itself it takes `p[1]` for a pattern."""
    return _PATTERN.sub(r"\\\g<0>", path)


def root_of(spark: SparkSession, url: StoreUrl) -> str | None:
    """Return the folder as Spark names it, where its Hadoop has the file system; else None.

    A URL with options names a server, which the connectors of Hadoop are not told of.

    Raises:
        StoreUnusable: it can be used by nothing else, and the connector is not there.
    """
    scheme, _, _ = url.for_hadoop.partition(":")
    if not url.options and has_filesystem(spark, scheme):
        return url.for_hadoop
    if url.scheme == S3A:
        raise StoreUnusable(
            f"{url} needs Hadoop's connector (hadoop-aws), which this Spark lacks: start it with one, or write s3://,"
            " which needs the extra `stores`, here and on all executors"
        )
    return None


def read_parquet(spark: SparkSession, root: str, files: Sequence[DataFile], schema: StructType) -> DataFrame:
    """Read the rows of the files. Columns that one lacks are null."""
    return spark.read.schema(schema).parquet(*(literal(f"{root}/{file.name}") for file in files))


def write_parquet(
    frame: DataFrame, root: str, *, folder: str, name: str, column: str | None
) -> Iterator[tuple[str, DataFile]]:
    """Write the rows to files in `folder`, and return these, each with its partition.

    This is `name`, or `name/column=value` of the rows in them.
    """
    place = f"{folder}/{name}-{uuid.uuid4().hex}"
    rows = frame if column is None else frame.withColumn("_of", sf.col(column))
    rows.write.partitionBy(*([] if column is None else ["_of"])).parquet(f"{root}/{place}")
    ids = [field for field in frame.schema if field.name == "id" and isinstance(field.dataType, LongType)]
    read = frame.sparkSession.read.schema(StructType(ids)).parquet(literal(f"{root}/{place}"))
    counted = read.groupBy(
        sf.col("_metadata.file_path").alias("path"), sf.col("_metadata.file_size").alias("size")
    ).agg(sf.count("*").alias("rows"), (sf.min("id") if ids else sf.lit(None)).alias("first_id"))
    for row in counted.collect():
        inside = row.path.rpartition(f"{place}/")[2]
        value = inside.rpartition("/")[0].removeprefix("_of=").replace(_UNDATED, UNKNOWN)
        file = DataFile(name=f"{place}/{inside}", rows=row["rows"], size=row["size"], first_id=row.first_id)
        yield f"{name}/{column}={value}" if column else name, file
