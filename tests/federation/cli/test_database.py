"""`federation db backup` and `federation db copy`."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from federation.cli.database import tasks_in
from federation.runtime.composition import Federation
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import on_the_node, owe, rows_of
from tests.federation.conftest import make_all_tables


async def owe_three(node: Federation) -> list[str]:
    return await owe(node, 3)


def test_a_backup_has_every_delivery(command: Command, tmp_path: Path) -> None:
    """And what the command says is what is there."""
    owed = on_the_node(owe_three)
    file = tmp_path / "backup.sqlite3"
    done = command("db", "backup", str(file), "--json")
    assert (done.status, done.stderr) == (0, "")
    assert done.json == {"file": str(file), "bytes": file.stat().st_size}
    assert file.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(file)) as connection:
        assert {row[0] for row in connection.execute("SELECT id FROM delivery_jobs")} == set(owed)


def test_a_backup_that_cannot_be_made_is_told_in_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is there, a directory that is not, a database that is not; which fails before anything is opened."""
    file = tmp_path / "backup.sqlite3"
    assert command("db", "backup", str(file)).status == 0
    again = command("db", "backup", str(file))
    assert (again.status, again.stdout, again.stderr) == (1, "", f"federation: {file} exists and stays as it is\n")
    nowhere = command("db", "backup", str(tmp_path / "missing" / "backup"))
    assert (nowhere.status, nowhere.stdout, nowhere.stderr.count("\n")) == (2, "", 1)
    monkeypatch.setenv("DATABASE_URL", "sqlite:///missing.sqlite3")
    missing = command("db", "backup", "backup")
    assert (missing.status, missing.stdout) == (2, "")
    assert missing.stderr.startswith("federation: DATABASE_URL: there is no database ")
    assert not Path("missing.sqlite3").exists()


def test_postgresql_is_backed_up_by_its_own_tool(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command names it, ready to be run, and no password."""
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:s3cret@db.example:5433/node?sslmode=require&password=s3cret")
    done = command("db", "backup", "a file")
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.endswith(
        "pg_dump --format=custom '--file=a file' 'postgresql://me@db.example:5433/node?sslmode=require'\n"
    )
    assert "s3cret" not in done.stderr


def test_a_new_database_is_filled(
    command: Command,
    node_environment: Mapping[str, str],
    database_file: Path,
    migrated_postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the old one, with every delivery; a second time it is in use, and stays as it is."""
    owed = on_the_node(owe_three)
    monkeypatch.setenv("DATABASE_URL", migrated_postgres_url)
    done = command("db", "copy", "--from", str(database_file), "--json")
    assert (done.status, done.stderr) == (0, "")
    assert isinstance(done.json, dict)
    assert done.json["rows"]["delivery_jobs"] == 3
    assert (done.json["left_to_host"], done.json["tasks_left"]) == ([], 0)
    assert set(on_the_node(rows_of)) == set(owed)
    again = command("db", "copy", "--from", str(database_file))
    assert (again.status, again.stdout) == (1, "")
    assert again.stderr == "federation: the new database is in use: delivery_jobs have rows; copy into an empty one\n"


def test_tasks_that_are_left_behind_are_counted(
    command: Command, database_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are jobs of the old queue, and of nothing else: a backup of that has them, a copy of the rows has not."""

    async def enqueue(node: Federation) -> None:
        for number in range(2):
            await node.tasks_queue.enqueue({"number": number}, name="digest")

    on_the_node(enqueue)
    assert command("db", "backup", str(tmp_path / "backup")).status == 0
    assert asyncio.run(tasks_in(tmp_path / "backup")) == 2
    make_all_tables(f"sqlite:///{tmp_path / 'new.sqlite3'}")
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path / 'new.sqlite3'}")
    done = command("db", "copy", "--from", str(database_file))
    assert done.status == 0
    assert f"not copied: 2 of the application's tasks, which are in the queue of {database_file} alone" in done.stdout
