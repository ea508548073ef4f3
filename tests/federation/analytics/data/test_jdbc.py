"""JDBC beside the data source: what Spark is told and reads, and what the operator is told who has no driver."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import text

from db.url import parse_url
from federation.analytics.data.export import export
from federation.analytics.data.inputs import read_exports
from federation.analytics.data.jdbc import DRIVERS, JdbcTables, jdbc_options, time_parts
from federation.analytics.data.source import SourceTables
from federation.analytics.data.tables import TABLES
from federation.analytics.errors import DatabaseUnavailable, DriverNotFound
from federation.analytics.frames import Inputs
from tests.federation.analytics.history import THREE_DAYS, attempt, execute, fill, moment
from tests.patience import LONG_PATIENCE_SECONDS
from tests.servers import free_port


def rows(frame: DataFrame) -> list[str]:
    return sorted(map(repr, frame.collect()))


POSTGRES = "postgresql+psycopg://reader:s3cret@db.example:5433/app?sslmode=require"


def test_a_window_of_attempts_is_read_in_parts() -> None:
    """By time, in UTC whatever the driver thinks; the password is in no option but the one Spark hides."""
    options = jdbc_options(POSTGRES, "delivery_attempts", since=moment(0, 0), until=moment(2, 0))
    assert options["url"] == "jdbc:postgresql://db.example:5433/app?sslmode=require"
    assert options["driver"] == "org.postgresql.Driver"
    assert (options["user"], options["password"]) == ("reader", "s3cret")
    assert time_parts(POSTGRES, "delivery_attempts", since=moment(0, 0), until=moment(2, 0), partitions=2) == [
        "started_at >= '2025-03-01 00:00:00' AND started_at < '2025-03-02 00:00:00'",
        "started_at >= '2025-03-02 00:00:00' AND started_at < '2025-03-03 00:00:00'",
    ]
    for name, since, until in (("server_registry", None, None), ("delivery_attempts", moment(0, 0), None)):
        assert time_parts(POSTGRES, name, since=since, until=until) is None
    assert "WHERE started_at >= '2025-03-01 00:00:00' AND started_at < '2025-03-03 00:00:00'" in options["dbtable"]
    assert options["preferTimestampNTZ"] == "true"
    assert [name for name, value in options.items() if "s3cret" in value] == ["password"]


def test_tables_without_a_time_are_read_whole(tmp_path: Path) -> None:
    """Of SQLite times come as texts, which its driver would misread; there is no user there."""
    options = jdbc_options(f"sqlite:///{tmp_path}/node.db", "server_registry")
    assert options["url"] == f"jdbc:sqlite:{tmp_path}/node.db"
    assert options["driver"] == "org.sqlite.JDBC"
    assert "CAST(last_seen AS TEXT) AS last_seen" in options["dbtable"]
    assert not {"user", "password"} & options.keys()
    assert time_parts(f"sqlite:///{tmp_path}/node.db", "delivery_attempts", since=moment(0), until=moment(2)) is None


@pytest.mark.parametrize("url", [POSTGRES, "sqlite:///node.db"], ids=["postgres", "sqlite"])
def test_a_missing_driver_is_told(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """In one line that names it, says what to do and shows no password."""
    monkeypatch.setitem(DRIVERS, "postgresql", "org.example.Driver")  # Spark may have the real one by now
    with pytest.raises(DriverNotFound, match=r"no JDBC driver org\..*--jdbc /path/to/driver\.jar") as error:
        JdbcTables(spark=spark, url=url).read("server_registry")
    assert "s3cret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_unix_socket_is_told() -> None:
    """Java reaches none."""
    with pytest.raises(DatabaseUnavailable, match="through a Unix socket, which Java cannot"):
        jdbc_options("postgresql:///app?host=/run/postgresql", "server_registry")
    named = jdbc_options("postgresql:///app?host=db.example&sslmode=require", "server_registry")
    assert named["url"] == "jdbc:postgresql://db.example/app?sslmode=require"


DRIVER = Path("/usr/share/java/postgresql.jar")
"""Where Debian puts it."""


class _Relay(BaseRequestHandler):
    """A connection by TCP, which is all that Java has, goes on to the server's Unix socket."""

    server: _RelayServer

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(self.server.path)
            back = Thread(target=self._pass, args=(there, self.request), daemon=True)
            back.start()
            self._pass(self.request, there)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class _RelayServer(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        self.path = path


@pytest.fixture
def by_tcp(postgres_only: str) -> Iterator[str]:
    """That database, where Java reaches it."""
    if not DRIVER.exists():
        pytest.skip("NOT RUN: there is no JDBC driver of PostgreSQL's (apt install libpostgresql-jdbc-java)")
    url = parse_url(postgres_only)
    with _RelayServer(f"{url.query['host']}/.s.PGSQL.5432") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        reached = url.set(host="127.0.0.1", port=server.server_address[1], query={}, password="s3cret")
        yield reached.render_as_string(hide_password=False)
        server.shutdown()


@pytest.fixture
def with_driver(spark: SparkSession) -> SparkSession:
    """The session, which has PostgreSQL's driver from now on."""
    spark.sql(f"ADD JAR {DRIVER}")
    return spark


@pytest.mark.parametrize(
    "bounds",
    [
        (None, None),
        (moment(0, 0), moment(2, 0)),
        pytest.param((moment(1, 0), None), marks=pytest.mark.full),
        pytest.param((None, moment()), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_tables_are_those_of_the_data_source(
    by_tcp: str, with_driver: SparkSession, bounds: tuple[datetime | None, datetime | None]
) -> None:
    """Every row of every table, with its types: texts, nulls, truth values, and instants to the microsecond."""
    odd = [attempt(600, moment(400)), attempt(601, moment(-400_000), relayed_by="Ü \U0001f600 'x' \\ \n")]
    fill(by_tcp, [*THREE_DAYS, *odd])
    execute(by_tcp, text("UPDATE delivery_attempts SET started_at = 'infinity' WHERE id = 1"))
    execute(by_tcp, text("UPDATE delivery_attempts SET started_at = '-infinity' WHERE id = 2"))
    jdbc, ours = (kind(spark=with_driver, url=by_tcp) for kind in (JdbcTables, SourceTables))
    for table, described in TABLES.items():
        since, until = bounds if described.time else (None, None)
        read, expected = (tables.read(table, since=since, until=until) for tables in (jdbc, ours))
        assert read.schema == expected.schema
        assert rows(read) == rows(expected), table


def test_a_server_that_is_gone_is_told(with_driver: SparkSession, by_tcp: str) -> None:
    """In one line without the password, which is all that there is to say of it."""
    gone = parse_url(by_tcp).set(port=free_port()).render_as_string(hide_password=False)
    with pytest.raises(DatabaseUnavailable, match="cannot be read through JDBC") as error:
        JdbcTables(spark=with_driver, url=gone).read("server_registry")
    assert "s3cret" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.full
def test_an_export_through_jdbc_is_that_of_the_data_source(spark: SparkSession, by_tcp: str, tmp_path: Path) -> None:
    """By the command, which hands the driver to Spark; nobody sees the password."""
    fill(by_tcp, [*THREE_DAYS, attempt(600, moment(400))])
    command = [sys.executable, "-m", "federation", "analytics", "export", "--json", "--master", "local[1]"]
    done = subprocess.run(
        [*command, "--out", "jdbc", "--jdbc", str(DRIVER)],
        cwd=tmp_path,
        env={**os.environ, "DATABASE_URL": by_tcp},
        capture_output=True,
        text=True,
        timeout=LONG_PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    told = export(SourceTables(spark=spark, url=by_tcp), tmp_path / "ours")
    assert json.loads(done.stdout)["attempts"] == {f"{day}": count for day, count in told.attempts.items()}
    through, expected = (read_exports(spark, tmp_path / name, told.window) for name in ("jdbc", "ours"))
    for name in Inputs.__slots__:
        frame, other = getattr(through, name), getattr(expected, name)
        assert (frame and rows(frame)) == (other and rows(other)), name
