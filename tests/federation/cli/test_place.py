"""Where a command finds itself: a directory without a node, and what it may make there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from db import Database
from federation.base.settings import Settings
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import on_the_node, owe
from tests.federation.cli.every_command import every_command, typed

MAKING = {"init", "upgrade", "db upgrade", "keys generate"}
ABOUT_FILES = {"analytics report"}
ELSEWHERE = [command for command in every_command() if command not in MAKING | ABOUT_FILES]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_directory_without_a_node_is_named_and_left_empty(
    command_anywhere: Command, empty_environment: Path, name: str
) -> None:
    """By every command but those that make a node."""
    done = command_anywhere(*typed(name))
    assert done.status in (1, 2)
    assert f"no .env and no database here, in {empty_environment}" in done.stdout + done.stderr
    assert len((done.stdout + done.stderr).splitlines()) <= 2
    assert list(empty_environment.iterdir()) == []


@pytest.mark.parametrize("variable", ["DATABASE_URL", "QUEUE_URL"])
@pytest.mark.parametrize("name", ["servers list", "queues stats", "db check", "doctor", "workers run"])
def test_a_database_that_is_not_there_is_not_made(
    command: Command, name: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two the setting names."""
    monkeypatch.setenv(variable, "sqlite:///absent.sqlite3")
    done = command(*typed(name))
    assert done.status in (1, 2)
    assert str(Path.cwd() / "absent.sqlite3") in done.stdout + done.stderr
    assert "`federation upgrade`" in done.stdout + done.stderr
    assert list(Path.cwd().iterdir()) == []


def test_what_init_makes_is_its_owners_alone(command_anywhere: Command, empty_environment: Path) -> None:
    """`.env`, the database, and what SQLite puts beside it while it is open."""
    assert command_anywhere("init").status == 0

    async def modes() -> dict[str, int]:
        database = Database(Settings.load().database_url.get_secret_value())
        try:
            async with database.transaction() as session:
                await (await session.connection()).exec_driver_sql("DELETE FROM delivery_jobs")
                return {file.name: stat.S_IMODE(file.stat().st_mode) for file in empty_environment.iterdir()}
        finally:
            await database.close()

    names = [".env", "federation.sqlite3", "federation.sqlite3-shm", "federation.sqlite3-wal"]
    assert on_the_node(lambda _: modes()) == dict.fromkeys(names, 0o600)


def test_a_database_of_queues_is_its_owners_alone(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_URL", "sqlite:///queue.sqlite3")
    assert command("upgrade").status == 0
    assert stat.S_IMODE(Path("queue.sqlite3").stat().st_mode) == 0o600


def test_a_database_that_is_there_keeps_its_mode(command: Command, database_file: Path) -> None:
    """A host under another user may work with it."""
    database_file.chmod(0o660)
    on_the_node(lambda node: owe(node, 1))
    assert command("upgrade").status == 0
    assert stat.S_IMODE(database_file.stat().st_mode) == 0o660
