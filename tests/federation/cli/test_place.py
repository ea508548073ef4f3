"""Where a command finds itself: a directory without a node, and what it may make there."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from db import Database
from federation.base.errors import ConfigurationError
from federation.base.settings.settings import Settings
from federation.runtime.nodes import get_federation
from tests import warm
from tests.federation.cli.conftest import LIMITED, Command
from tests.federation.cli.elsewhere import on_the_node, owe
from tests.federation.cli.every_command import every_command, typed
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]

MAKING = {"init", "upgrade", "db upgrade", "keys generate"}
ABOUT_FILES = {"analytics report", "analytics forget"}
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
                return {name: stat.S_IMODE(os.stat(name).st_mode) for name in os.listdir()}
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


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("FEDERATION_PORTT", "FEDERATION_PORT"),
        ("FEDERATON_PORT", "FEDERATION_PORT"),
        ("federation_release_rat", "FEDERATION_RELEASE_RATE"),
    ],
)
@pytest.mark.parametrize("place", ["environment", ".env"])
def test_a_misspelt_variable_is_named_with_the_nearest(
    command: Command, written: str, meant: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr by a command, and as a warning by the doctor; never with its value."""
    if place == ".env":
        Path(".env").write_text(f"{written}=s3cret\n")
    else:
        monkeypatch.setenv(written, "s3cret")
    done = command("servers", "list", "--json")
    assert done.status == 0
    assert done.stderr == f"federation: {written} has no effect: there is no such setting; is {meant} meant?\n"
    doctor = command("doctor", "--json").json
    assert isinstance(doctor, dict)
    assert doctor["findings"][0]["verdict"] == "warning"
    assert f"{written} has no effect" in doctor["findings"][0]["found"]


def test_a_line_that_sets_nothing_is_named_with_its_file(command: Command) -> None:
    """And never shown: it may be half of a secret."""
    Path(".env").write_text('# ours\nthis is s3cret\n\nFEDERATION_LEASE="30s\n')
    done = command("servers", "list", "--json")
    assert done.status == 0
    assert done.stderr.splitlines() == [
        f"federation: .env: line {line} has no effect: it is no NAME=VALUE" for line in (2, 4)
    ]


def test_a_variable_of_a_host_is_not_taken_for_a_setting(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins as ours do is named all the same; there is no other to name beside it."""
    monkeypatch.setenv("DELIVERY_CONCURRENCY", "1")
    assert command("servers", "list").stderr == ""
    monkeypatch.setenv("FEDERATION_ZZZ", "1")
    assert command("servers", "list").stderr.endswith("FEDERATION_ZZZ has no effect: there is no such setting\n")


def test_init_says_what_a_foreign_env_file_lacks(command_anywhere: Command, empty_environment: Path) -> None:
    """And makes no database for a node that could not run."""
    Path(".env").write_text("SECRET_OF_THE_HOST=1\n")
    done = command_anywhere("init", "--url", "https://a.example")
    assert (done.status, done.stderr) == (
        2,
        "federation: .env is there already, and not a node's: make the node in a folder of its own, or add to .env "
        "BETTER_AUTH_URL=https://a.example and the keys that `federation keys generate FILE` writes\n",
    )
    assert [file.name for file in empty_environment.iterdir()] == [".env"]


def test_an_env_file_that_is_no_text_is_told(command: Command) -> None:
    """Once, by the settings themselves."""
    Path(".env").write_bytes(b"FEDERATION_PORTT=\xff\n")
    done = command("servers", "list")
    assert (done.status, done.stderr) == (2, "federation: .env: not a text file in UTF-8\n")


def test_a_node_whose_url_the_environment_says_is_not_told_to_say_it(
    command_anywhere: Command, empty_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its URL was chosen, as if by --url."""
    monkeypatch.setenv("BETTER_AUTH_URL", "https://a.example")
    done = command_anywhere("init")
    assert (done.status, "nobody said --url" in done.stdout) == (0, False)


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("http://127.0.0.1:8451", set()),
        ("http://localhost:8451", set()),
        ("http://[::1]:8451", set()),
        ("http://127.0.0.2:8451", {"127.0.0.2"}),
    ],
)
def test_a_node_on_loopback_may_send_to_its_machine(
    command_anywhere: Command, empty_environment: Path, url: str, more: set[str]
) -> None:
    """By what `init` writes, and says; without that it says what is missing."""
    done = command_anywhere("init", "--url", url)
    assert "it may send to this machine (DEV_ALLOWED_HOSTNAMES)" in done.stdout
    assert Settings.load().dev_allowed_hostnames == {"127.0.0.1", "localhost", "::1", *more}
    env = Path(".env")
    env.write_text(re.sub("DEV_ALLOWED_HOSTNAMES.*", "DEV_ALLOWED_HOSTNAMES=intranet.example", env.read_text()))
    assert "it sends nothing to this machine: set DEV_ALLOWED_HOSTNAMES" in command_anywhere("init").stdout


def test_a_public_node_sends_nothing_to_its_machine(command_anywhere: Command, empty_environment: Path) -> None:
    done = command_anywhere("init", "--url", "https://node.example")
    assert "this machine" not in done.stdout
    assert "DEV_ALLOWED_HOSTNAMES" not in Path(".env").read_text()


def test_a_node_that_nobody_named_may_still_get_a_name(command_anywhere: Command, empty_environment: Path) -> None:
    """As `init` says when it makes one, and only then."""
    told = "remove .env, and `federation init --url URL` makes another"
    assert told in command_anywhere("init").stdout
    assert told not in command_anywhere("init").stdout
    Path(".env").unlink()
    assert told not in command_anywhere("init", "--url", "https://node.example").stdout
    assert Settings.load().better_auth_url == "https://node.example"
    assert command_anywhere("servers", "list").status == 0


INIT = ["-m", "federation", "init"]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("room", [0, 100, 5_000, 100_000])
def test_a_full_disk_is_told_and_leaves_nothing_half_done(tmp_path: Path, room: int) -> None:
    """In one line; with room enough `init` does the rest, host tables and all."""
    folder = tmp_path / "full"
    folder.mkdir()
    full = subprocess.run(
        [warm.PYTHON, "-c", LIMITED, "RLIMIT_FSIZE", str(room), "init"],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert full.returncode == 2
    assert len(full.stderr.splitlines()) == 1
    if room < 200:
        assert list(folder.iterdir()) == []
    else:
        assert "disk" in full.stderr
    done = subprocess.run(
        [warm.PYTHON, *INIT], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, "made minimal host tables" in done.stdout) == (0, True)


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A directory whose parents anybody may pass through, unlike pytest's own."""
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o555)
        yield folder


def test_a_directory_that_may_not_be_written_to_is_told(read_only: Path) -> None:
    """In one line, by a user who is not allowed everything."""
    tried = subprocess.run(
        [warm.PYTHON, "-c", AS_NOBODY, str(ROOT)],
        cwd=read_only,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (tried.returncode, tried.stdout) == (2, "")
    told = f"federation: the folder {read_only} cannot be written (Permission denied); "
    assert (tried.stderr.startswith(told), tried.stderr.count("\n")) == (True, 1)
    assert list(read_only.iterdir()) == []


AS_NOBODY = """
import os
import federation.cli, federation.base.settings.settings, federation.base.settings.misspelt
import federation.protocol.keys, db.migrate
if os.geteuid() == 0:  # loaded before: nobody need not be able to read the code
    os.setegid(65534)
    os.seteuid(65534)
federation.cli.main(["init"])
"""


def test_an_application_in_the_wrong_folder_is_sent_to_the_nodes(
    empty_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables name a database that is not there; a queue by itself would name another command."""
    monkeypatch.setenv("DATABASE_URL", "sqlite:///federation.sqlite3")
    monkeypatch.setenv("BETTER_AUTH_URL", "http://127.0.0.1:8461")
    with pytest.raises(ConfigurationError, match="go to the node's folder, or make it by `federation init`"):
        get_federation()
    assert list(empty_environment.iterdir()) == []
