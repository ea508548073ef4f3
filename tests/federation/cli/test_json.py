"""`docs/cli-json.md` against the commands: each has `--json`, and prints what is written there, errors included."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Final

import pytest

from db import ReceivedState
from federation.cli.problems import Kind
from tests.federation.admin.activities import add_alice, befriend, lose_inbox, receive
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import PEER, give_up, know, live_without_a_host, on_the_node, owe, put_on_hold
from tests.federation.cli.every_command import every_command, typed
from tests.federation.protocol.vectors import A
from tests.servers import free_port

DOCUMENT = (Path(__file__).parents[3] / "docs" / "cli-json.md").read_text()
SCHEMA = json.loads(DOCUMENT.partition("```json\n")[2].partition("```")[0])

COMMANDS: Final[dict[str, object]] = SCHEMA["commands"]
LASTING = {"run", "workers run", "node serve", "deliveries tail", "dashboard"}
WITH_SPARK = {"analytics run", "analytics export", "analytics report", "analytics forget"}
WITH_A_PEER = {"servers discover"}
WITH_ANOTHER_DATABASE = {"db copy"}
READING = [name for name in COMMANDS if name not in LASTING | WITH_SPARK | WITH_A_PEER | WITH_ANOTHER_DATABASE]


def matches(value: object, shape: object) -> bool:
    """Whether the value has that shape, no field more and none less."""
    match shape:
        case dict():
            return isinstance(value, dict) and _fits(value, shape)
        case [each]:
            return isinstance(value, list) and all(matches(item, each) for item in value)
        case str() if shape.endswith("?"):
            return value is None or matches(value, shape.removesuffix("?"))
        case str() if shape in SCHEMA["types"]:
            return matches(value, SCHEMA["types"][shape])
    return _is_plain(value, shape)


def _fits(value: Mapping[str, object], shape: Mapping[str, object]) -> bool:
    named = shape.keys() - {"*"}
    others = {name: each for name, each in value.items() if name not in named}
    return (
        named <= value.keys()
        and all(matches(value[name], shape[name]) for name in named)
        and ("*" in shape or not others)
        and all(matches(each, shape["*"]) for each in others.values())
    )


def _is_plain(value: object, shape: object) -> bool:
    match shape:
        case "any":
            return True
        case "text":
            return isinstance(value, str)
        case "number" | "duration":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "yes/no":
            return isinstance(value, bool)
        case "time":
            return isinstance(value, str) and value.endswith("Z") and bool(datetime.fromisoformat(value))
        case "day":
            return isinstance(value, str) and bool(date.fromisoformat(value))
    raise AssertionError(f"{shape!r} is no type")


def test_every_command_is_written_down() -> None:
    """And no other."""
    assert sorted(COMMANDS) == every_command()


@pytest.fixture(scope="module")
def busy(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A database with one of each thing that commands tell of, to be copied; the ids of the deliveries."""
    file = tmp_path_factory.mktemp("busy") / "node.sqlite3"
    shutil.copy(migrated_file, file)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {
            **A.env,
            "BETTER_AUTH_URL": "https://a.example",
            "DATABASE_URL": f"sqlite:///{file}",
        }.items():
            patched.setenv(name, value)
        on_the_node(know)
        ids: list[str] = on_the_node(lambda node: owe(node, 3))
        on_the_node(lambda node: give_up(node, ids[:1], "HTTP_500"))
        on_the_node(lambda node: put_on_hold(node, ids[1:2]))
    return file, ids


@pytest.fixture
def busy_node(command: Command, database_file: Path, busy: tuple[Path, list[str]]) -> list[str]:
    """The database of the command is a copy of that one; the ids of the deliveries."""
    file, ids = busy
    shutil.copy(file, database_file)
    Path("rules.csv").write_text("server_url,reason\nhttps://new.example,spam\nnonsense,why\n")
    return ids


def prepare(command: Command, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command needs to have something to tell."""
    if name.startswith("activitypub"):
        monkeypatch.setenv("FEDERATION_ACTIVITYPUB", "1")
        on_the_node(add_alice)
        on_the_node(lambda node: befriend(node, f"{PEER}/users/bob"))
        on_the_node(lambda node: lose_inbox(node, PEER))
        on_the_node(lambda node: receive(node, "failed", state=ReceivedState.FAILED))
    if name.startswith("users"):
        command("db", "upgrade", "--host-tables")
    if name in ("follow", "post", "received"):
        live_without_a_host(command)
    if name == "users list":
        command("users", "add", "bob")
    if name.startswith("blacklist") and name != "blacklist add":
        command("blacklist", "add", "https://evil.example", "--reason", "spam")
    if name == "blacklist check":
        command("blacklist", "add", "*.peer.example", "--reason", "spam", "--for", "1d")


@pytest.mark.parametrize("name", READING)
def test_a_command_prints_what_is_written_down(
    command: Command, busy_node: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One document on stdout, and nothing on stderr."""
    prepare(command, name, monkeypatch)
    arguments = ["deliveries", "show", busy_node[0]] if name == "deliveries show" else typed(name)
    done = command(*arguments, "--json")
    assert done.stderr == ""
    assert matches(done.json, COMMANDS[name]), done.stdout
    assert done.status in (0, 1)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_errors_are_json_on_stdout(
    command_anywhere: Command, empty_environment: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of wrong settings and of wrong usage, by every command; with the status they have without."""
    for arguments in ([*typed(name), "--json", "--no-such-option"], [*name.split(), "too", "many", "words", "--json"]):
        done = command_anywhere(*arguments)
        assert (done.status, done.stderr) == (2, "")
        assert matches(done.json, SCHEMA["error"])
    if name == "keys generate":
        return
    monkeypatch.setenv("DATABASE_URL", f"postgresql://u:s3cret@127.0.0.1:{free_port()}/x")
    monkeypatch.setenv("FEDERATION_PORT", "s3cret")
    plain = command_anywhere(*typed(name))
    done = command_anywhere(*typed(name), "--json")
    assert done.status == plain.status != 0
    assert "s3cret" not in done.stdout
    expected = COMMANDS[name] if name == "doctor" else SCHEMA["error"]
    assert matches(done.json, expected), done.stdout


def test_every_kind_of_error_is_written_down() -> None:
    """In the table."""
    assert set(re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE)) == {kind.value for kind in Kind}


def test_a_bug_is_told_to_a_program_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback goes where it always goes."""
    monkeypatch.setattr("federation.base.settings.settings.Settings.load", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command("servers", "list", "--json")
