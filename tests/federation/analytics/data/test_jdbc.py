"""JDBC beside the data source: what Spark is told, and what the operator is told where there is no driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from federation.analytics.data.jdbc import JdbcTables, jdbc_options
from federation.analytics.errors import DriverNotFound
from tests.federation.analytics.history import moment

POSTGRES = "postgresql+psycopg://reader:s3cret@db.example:5433/app?sslmode=require"


def test_a_window_of_attempts_is_read_in_parts() -> None:
    """By time, in UTC whatever the driver thinks; the password is in no option but the one Spark hides."""
    options = jdbc_options(POSTGRES, "delivery_attempts", since=moment(0, 0), until=moment(2, 0))
    assert options["url"] == "jdbc:postgresql://db.example:5433/app?sslmode=require"
    assert options["driver"] == "org.postgresql.Driver"
    assert (options["user"], options["password"]) == ("reader", "s3cret")
    assert options["partitionColumn"] == "started_at"
    assert (options["lowerBound"], options["upperBound"]) == ("2025-03-01 00:00:00", "2025-03-03 00:00:00")
    assert int(options["numPartitions"]) > 1
    assert "WHERE started_at >= '2025-03-01 00:00:00' AND started_at < '2025-03-03 00:00:00'" in options["dbtable"]
    assert options["preferTimestampNTZ"] == "true"
    assert [name for name, value in options.items() if "s3cret" in value] == ["password"]


def test_tables_without_a_time_are_read_whole(tmp_path: Path) -> None:
    """Of SQLite times come as texts, which its driver would misread; there is no user there."""
    options = jdbc_options(f"sqlite:///{tmp_path}/node.db", "server_registry")
    assert options["url"] == f"jdbc:sqlite:{tmp_path}/node.db"
    assert options["driver"] == "org.sqlite.JDBC"
    assert "CAST(last_seen AS TEXT) AS last_seen" in options["dbtable"]
    assert not {"user", "password", "partitionColumn"} & options.keys()


@pytest.mark.parametrize("url", [POSTGRES, "sqlite:///node.db"], ids=["postgres", "sqlite"])
def test_a_missing_driver_is_told(spark: SparkSession, url: str) -> None:
    """In one line that names it, says what to do and shows no password."""
    with pytest.raises(DriverNotFound, match=r"no JDBC driver org\..*--jdbc /path/to/driver\.jar") as error:
        JdbcTables(spark=spark, url=url).read("server_registry")
    assert "s3cret" not in str(error.value)
    assert "\n" not in str(error.value)
