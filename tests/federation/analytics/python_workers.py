"""Spark's daemon of Python workers, which forks them: here with what they import in memory already."""

from __future__ import annotations

from importlib import import_module

from pyspark import daemon

NEEDED = (
    "pyarrow.parquet",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.worker",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
)

if __name__ == "__main__":
    for name in NEEDED:
        import_module(name)
    daemon.manager()
