"""Commands whose database or queue does not answer: one line, status 2, no traceback, no password."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError

from db import FederationTable
from db.engines import migration_engine
from db.url import parse_url
from federation.cli.problems import explain
from tests import warm
from tests.federation.cli.conftest import Command
from tests.federation.conftest import alter
from tests.patience import PATIENCE_SECONDS
from tests.servers import free_port

ROOT = Path(__file__).parents[3]
MIGRATIONS = Path(__file__).parents[3] / "db" / "migrations" / "versions"

HEAD = max(file.name[1:5] for file in MIGRATIONS.glob("v*.py"))
READING = [
    ["servers", "list"],
    ["why", "peer.example"],
    ["deliveries", "stats"],
    ["blacklist", "check", "peer.example"],
    ["scheduler", "run", "purge"],
]
QUEUEING = [["queues", "stats"], ["queues", "pause"], ["workers", "list"], ["queues", "clean", "--yes"]]


def one_line(command: Command, arguments: list[str]) -> str:
    done = command(*arguments)
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.startswith("federation: ")
    assert done.stderr.count("\n") == 1
    assert "s3cret" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("arguments", [*READING, *QUEUEING], ids=" ".join)
def test_a_dead_database_is_told(command: Command, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgresql://u:s3cret@127.0.0.1:{free_port()}/x")
    assert "the database cannot be used" in one_line(command, arguments)


@pytest.mark.parametrize("setting", ["REDIS_URL", "QUEUE_URL"])
@pytest.mark.parametrize("arguments", QUEUEING, ids=" ".join)
def test_a_dead_redis_is_told(
    command: Command, arguments: list[str], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, f"redis://:s3cret@127.0.0.1:{free_port()}")
    assert "the queue federation-delivery cannot be used" in one_line(command, arguments)


@pytest.mark.parametrize("arguments", [*READING, *QUEUEING], ids=" ".join)
def test_a_database_not_upgraded_is_told_with_what_to_do(
    command: Command, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("new.sqlite3").touch()
    monkeypatch.setenv("DATABASE_URL", "sqlite:///new.sqlite3")
    assert "run `federation upgrade`" in one_line(command, arguments)
    check = command("db", "check", "--json")
    missing = sorted(FederationTable.metadata.tables)
    told = {"current": None, "expected": HEAD, "up_to_date": False, "missing": missing}
    assert (check.status, check.json) == (1, told)


def test_upgrading_makes_it_well(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "sqlite:///new.sqlite3")
    assert command("db", "upgrade").status == 0
    assert command("db", "check").status == 0
    assert command("queues", "stats").status == 0


def test_a_database_of_a_newer_version_is_worked_with(command: Command, database_file: Path) -> None:
    """Its columns are all there: a process that has not been updated yet goes on."""
    connection = sqlite3.connect(database_file)
    connection.execute("UPDATE federation_alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    assert command("deliveries", "stats").status == 0


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_table_that_is_gone_is_told_by_its_name(
    command: Command, arguments: list[str], monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    """And nobody is sent to look whether the server is up."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    alter(database_url, "DROP TABLE server_links")
    told = one_line(command, arguments)
    assert "lacks server_links" in told
    assert "server up" not in told


def test_a_statement_that_is_refused_is_no_outage(database_url: str) -> None:
    """Whoever reads it is sent to the tables; of an outage, to the URL and the server."""
    engine = migration_engine(parse_url(database_url))
    with pytest.raises(SQLAlchemyError) as refused, engine.connect() as connection:
        connection.exec_driver_sql("SELECT s3cret FROM nowhere")
    engine.dispose()
    (told,) = explain(refused.value)
    assert "federation doctor" in told
    assert "server up" not in told
    assert "s3cret" not in told
    engine = migration_engine(parse_url(f"postgresql://u:s3cret@127.0.0.1:{free_port()}/x"))
    with pytest.raises(SQLAlchemyError) as dead:
        engine.connect()
    engine.dispose()
    (told,) = explain(dead.value)
    assert "server up" in told
    assert "s3cret" not in told


@pytest.fixture
def silence() -> Iterator[int]:
    """The port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("variable", "url", "arguments"),
    [
        ("DATABASE_URL", "postgresql://u:s3cret@127.0.0.1:{}/x", ["servers", "list"]),
        pytest.param("DATABASE_URL", "postgresql://u:s3cret@127.0.0.1:{}/x", ["upgrade"], marks=pytest.mark.full),
        pytest.param("DATABASE_URL", "postgresql://u:s3cret@127.0.0.1:{}/x", ["doctor"], marks=pytest.mark.full),
        ("REDIS_URL", "redis://:s3cret@127.0.0.1:{}", ["queues", "stats"]),
        pytest.param("REDIS_URL", "redis://:s3cret@127.0.0.1:{}", ["doctor"], marks=pytest.mark.full),
        pytest.param("QUEUE_URL", "postgresql://u:s3cret@127.0.0.1:{}/x", ["queues", "stats"], marks=pytest.mark.full),
        pytest.param("QUEUE_URL", "postgresql://u:s3cret@127.0.0.1:{}/x", ["upgrade"], marks=pytest.mark.full),
        ("QUEUE_URL", "postgresql://u:s3cret@127.0.0.1:{}/x", ["doctor"]),
    ],
)
def test_what_does_not_answer_is_told_within_ten_seconds(
    node_environment: Mapping[str, str], silence: int, variable: str, url: str, arguments: list[str]
) -> None:
    """As a user waits for it: a process from its start to its end; more where the machine is slow."""

    def run(port: int) -> tuple[subprocess.CompletedProcess[str], float]:
        started = time.monotonic()
        done = subprocess.run(
            [warm.PYTHON, "-m", "federation", *arguments],
            env={**node_environment, "PYTHONPATH": str(ROOT), variable: url.format(port)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        return done, time.monotonic() - started

    _, unhindered = run(free_port())
    done, took = run(silence)
    assert took < 10 + 2 * unhindered
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    assert "server up" in done.stdout + done.stderr or "cannot be reached" in done.stderr or "start it" in done.stdout
