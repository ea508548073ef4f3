"""Lists on terminals: what they show, how wide they are, and what may be typed of an id."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert

from db import DeliveryJob, DeliveryState, RunOutcome, SchedulerJob, new_timed_id
from federation.cli.lists import shortened
from federation.runtime.composition import Federation
from tests import warm
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import PEER, give_up, know, on_the_node, owe, put_on_hold
from tests.patience import PATIENCE_SECONDS

LISTS = ("servers", "deliveries", "blacklist", "scheduler", "workers", "actions")
COLOUR = re.compile(r"\x1b\[\d*m")


@pytest.fixture
def busy(command: Command) -> list[str]:
    """A node that has something in each list; the ids of its deliveries."""
    on_the_node(know)
    ids: list[str] = on_the_node(lambda node: owe(node, 3))
    on_the_node(lambda node: give_up(node, ids[:1], "HTTP_500"))
    on_the_node(lambda node: put_on_hold(node, ids[1:2]))
    on_the_node(ran)
    command("db", "upgrade", "--host-tables")
    command("users", "add", "alice")
    command("blacklist", "add", "https://evil.example", "--reason", "spam since Monday")
    return ids


async def ran(node: Federation) -> None:
    """A worker, and a recurring job, and how that went."""
    await node.health_check_queue.start()
    await node.health_check_queue.storage.claim(new_timed_id(), leases={"*": timedelta(minutes=1)}, limit=1)
    now = datetime.now(UTC)
    row = {"started_at": now, "finished_at": now, "outcome": RunOutcome.DONE, "detail": '{"deleted": 7, "left": 0}'}
    async with node.database.transaction() as session:
        await session.execute(insert(SchedulerJob).values(name="purge", **row))


def on_a_terminal(width: int, *arguments: str, **environment: str) -> str:
    """What the command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "TERM")}
    child = subprocess.Popen(
        [warm.PYTHON, "-m", "federation", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm", **environment},
    )
    os.close(theirs)
    printed = b"".join(_read(ours))
    os.close(ours)
    child.wait(PATIENCE_SECONDS)
    return printed.decode().replace("\r\n", "\n")


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(terminal, 65_536)
        except OSError:  # as Linux says that nobody has the other side any more
            return


@pytest.mark.parametrize("noun", [*LISTS, "queues"])
def test_a_list_fits_eighty_columns(busy: list[str], noun: str) -> None:
    """As a table; forty have a line for each value."""
    verb = "stats" if noun == "queues" else "list"
    for width in (80, 40):
        lines = COLOUR.sub("", on_a_terminal(width, noun, verb)).splitlines()
        assert max(map(len, lines)) <= width
        assert ("  " in lines[0]) == (width == 80)  # the names of columns, or one value


def test_states_have_colours_unless_somebody_wants_none(busy: list[str]) -> None:
    """In lists, and where one delivery is shown."""
    for arguments in (["deliveries", "list"], ["deliveries", "show", busy[0]]):
        assert "\x1b[31mfailed\x1b[0m" in on_a_terminal(80, *arguments)
        for off in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            assert "\x1b" not in on_a_terminal(80, *arguments, **off)
    assert "\x1b" in on_a_terminal(80, "doctor")
    assert "\x1b" not in on_a_terminal(80, "doctor", NO_COLOR="1")


def test_columns_are_chosen(command: Command, busy: list[str]) -> None:
    """All of them, or those that are named, in that order."""
    few = command("deliveries", "list").stdout.splitlines()[0].split()
    assert few == ["ID", "STATE", "AGE", "CODE", "SERVER"]
    assert "LAST ATTEMPT" in command("deliveries", "list", "--wide").stdout.splitlines()[0]
    chosen = command("deliveries", "list", "--columns", "state, held-for,full id").stdout.splitlines()
    assert re.fullmatch("STATE +HELD FOR +FULL ID", chosen[0])
    assert [line.split() for line in chosen[1:]] == [
        *(["failed", "-", busy[0]], ["held", "server", busy[1]], ["ready", "-", busy[2]]),
    ]
    wrong = command("deliveries", "list", "--columns", "state,colour")
    assert (wrong.status, wrong.stdout) == (2, "")
    assert "there is no column colour; there are id, full id, server, " in wrong.stderr


@pytest.mark.spread("database_url")
@pytest.mark.parametrize(
    "arguments",
    [
        ("deliveries", "list", "--activity"),
        ("users", "list", "--after"),
        ("activitypub", "received", "list", "--actor"),
        ("activitypub", "follows", "--actor"),
        ("activitypub", "actors", "list", "--after"),
        ("actions", "list", "--columns"),
    ],
    ids=" ".join,
)
def test_what_is_no_text_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, database_url: str, arguments: tuple[str, ...]
) -> None:
    """Bytes that are no UTF-8, which no database takes: wrong usage, in a line."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("FEDERATION_ACTIVITYPUB", "1")
    command("db", "upgrade", "--host-tables")
    done = command(*arguments, "x\udcff")
    assert (done.status, done.stdout, "Traceback" in done.stderr) == (2, "", False)


def test_no_cell_is_json(command: Command, busy: list[str]) -> None:
    """But words."""
    command("deliveries", "drop", *busy[:2], "--yes")
    assert re.search("done +7 deleted", command("scheduler", "list", "--wide").stdout)
    listed = command("actions", "list", "--wide").stdout
    assert f"ids: {busy[0]} {busy[1]}" in listed
    assert not set("[]{}'\"") & set(listed)


def test_an_id_may_be_typed_as_it_is_shown(command: Command, busy: list[str]) -> None:
    """To show, retry and drop it; a few characters are no id, and what belongs to none is said to."""
    shown = [line.split()[0] for line in command("deliveries", "list").stdout.splitlines()[1:]]
    assert shown == [each[-8:] for each in busy]
    assert busy[0] in command("deliveries", "show", shown[0]).stdout
    assert command("deliveries", "retry", shown[0]).stdout == f"1 delivery is owed again ({busy[0]})\n"
    asked = command("deliveries", "drop", shown[1], busy[2])
    assert asked.stderr.startswith(f"federation: Drop 2 deliveries ({busy[1]}, {busy[2]})? What is dropped cannot be")
    dropped = command("deliveries", "drop", shown[1], busy[2], "--yes").stdout
    assert dropped == f"2 deliveries are dropped ({busy[1]}, {busy[2]})\n"
    assert command("deliveries", "show", busy[0][-7:]).status == 1
    assert command("deliveries", "show", "%" + shown[0]).status == 1


def test_an_id_that_may_be_another_is_refused(command: Command) -> None:
    """Unless it is one itself."""
    on_the_node(lambda node: add(node, "1-abcdefgh", "abcdefgh"))
    assert command("deliveries", "drop", "abcdefgh", "--yes").stdout == "1 delivery is dropped\n"
    on_the_node(lambda node: add(node, "2-abcdefgh", "3-ABCDEFGH"))
    refused = command("deliveries", "drop", "abcdefgh", "--yes")
    assert (refused.status, refused.stdout) == (2, "")
    assert "more than one delivery's id ends with abcdefgh: 1-abcdefgh, 2-abcdefgh\n" in refused.stderr
    assert command("deliveries", "drop", "ABCDEFGH", "--yes").stdout == "1 delivery is dropped (3-ABCDEFGH)\n"


async def add(node: Federation, *ids: str) -> None:
    """Deliveries that were given up."""
    row = {"target_url": f"{PEER}/x", "payload": "{}", "state": DeliveryState.FAILED}
    made = datetime.now(UTC) - timedelta(minutes=1)
    async with node.database.transaction() as session:
        await session.execute(insert(DeliveryJob), [{"id": each, "created_at": made, **row} for each in ids])


@pytest.mark.parametrize(
    ("ids", "short"),
    [
        ([], []),
        (["7"], ["7"]),
        (["a-11111111", "a-22222222"], ["11111111", "22222222"]),
        (["a-11111111", "b-11111111"], ["a-11111111", "b-11111111"]),
        (["x", "a-long-one"], ["x", "long-one"]),
    ],
)
def test_a_short_id_is_as_long_as_it_has_to_be(ids: list[str], short: list[str]) -> None:
    """To tell it from the others of its list."""
    assert shortened(ids) == short
