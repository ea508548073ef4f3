"""`federation actions list`: what every acting command leaves in the audit log."""

from __future__ import annotations

import getpass
from typing import Any

import pytest

from db import ActionSource, ReceivedState
from federation.admin.deliveries.holds import release_all
from federation.base.audit import Order, recorded
from federation.runtime.composition import Federation
from tests.federation.activitypub.sender import ALICE
from tests.federation.admin.activities import add_alice, receive
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import PEER, give_up, know, live_without_a_host, on_the_node, owe, put_on_hold
from tests.federation.cli.every_command import every_command, typed

READING = {
    *("activitypub actors list", "activitypub follows", "activitypub gone", "activitypub keys list"),
    "activitypub received list",
    *("actions list", "analytics report", "blacklist check", "blacklist export", "blacklist list", "db check"),
    *("deliveries list", "deliveries show", "deliveries stats", "doctor", "keys show", "queues stats", "received"),
    *("scheduler list", "servers list", "servers show", "users list", "why", "workers list"),
}
LASTING = {"run", "workers run", "node serve", "deliveries tail", "dashboard"}
ON_FILES = {"analytics run", "analytics export", "analytics forget", "db backup", "keys generate"}
"""They change no row of this node's database."""
SETTING_UP = {"init", "upgrade", "db upgrade", "db copy"}
"""There may be no audit log before them."""
TO_A_PEER = {"servers discover"}


def told(command: Command, *options: str) -> list[dict[str, Any]]:
    done = command("actions", "list", "--json", *options)
    assert (done.status, done.stderr) == (0, "")
    found: list[dict[str, Any]] = done.json["actions"]  # type: ignore[index] # a document of ours
    return found


def prepare(command: Command, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("activitypub"):
        monkeypatch.setenv("FEDERATION_ACTIVITYPUB", "1")
        on_the_node(add_alice)
        on_the_node(lambda node: receive(node, "failed", state=ReceivedState.FAILED))
    on_the_node(know)
    ids: list[str] = on_the_node(lambda node: owe(node, 4))
    on_the_node(lambda node: give_up(node, ids[:2], "HTTP_500"))
    on_the_node(lambda node: put_on_hold(node, ids[2:3]))
    if name in ("follow", "post"):
        live_without_a_host(command)
    if name == "users add":
        command("db", "upgrade", "--host-tables")
    if name == "blacklist remove":
        command("blacklist", "add", "https://evil.example", "--reason", "spam")
    with open("rules.csv", "w") as file:
        file.write("server_url,reason\nhttps://new.example,spam\n")


ACTING = {
    "activitypub actors add": ({"actor": ALICE}, 1),
    "activitypub actors remove": ({"actor": ALICE}, 1),
    "activitypub keys rotate": ({"actor": ALICE}, 1),
    "activitypub received retry": ({"all": True}, 1),
    "deliveries retry": ({}, 2),
    "deliveries drop": ({}, 4),
    "deliveries expire": ({}, 0),
    "deliveries hold": ({}, 2),
    "deliveries release": ({}, 1),
    "servers probe": ({}, 0),
    "servers set": ({"profile": "original"}, 1),
    "servers accept-key": ({}, 2),
    "servers forget": ({}, 1),
    "blacklist add": ({"rule": "https://evil.example", "reason": "spam"}, 1),
    "blacklist remove": ({"rule": "https://evil.example"}, 1),
    "blacklist import": ({"file": "rules.csv"}, 1),
    "queues pause": ({}, 4),
    "queues resume": ({}, 4),
    "queues clean": ({"state": "completed", "older_than": "1d"}, 0),
    "queues repair": ({"drop": True}, 0),
    "scheduler run": ({"name": "purge"}, 1),
    "keys rotate": ({"forget_old": True}, 0),
    "users add": ({"id": "alice", "posts_to": "all"}, 1),
    "follow": ({"id": "bob", "as": "carol"}, 1),
    "post": ({"as": "carol"}, 1),
}
"""What is told of each: its arguments, and how many things it changed."""


def test_every_command_acts_or_does_not() -> None:
    """A new command has to say which."""
    assert {*ACTING, *READING, *LASTING, *ON_FILES, *SETTING_UP, *TO_A_PEER} == set(every_command())


@pytest.mark.parametrize("name", ACTING)
def test_an_acting_command_is_in_the_audit_log(command: Command, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with who, what, when it ended, and how many things it changed."""
    prepare(command, name, monkeypatch)
    command(*typed(name))
    row = told(command)[0]
    assert (row["action"], row["source"], row["error"]) == (name, "cli", None)
    assert (row["arguments"], row["affected"]) == ACTING[name]
    assert row["actor"].startswith(getpass.getuser())
    assert row["finished_at"] >= row["at"]
    assert (row["server_url"] == PEER) == (PEER in typed(name))


def test_what_changes_nothing_is_not_told(command: Command) -> None:
    """Where the transaction finds nothing to do."""
    for arguments in (["servers", "forget", PEER, "--yes"], ["blacklist", "remove", PEER], ["deliveries", "drop", "x"]):
        assert command(*arguments).status == 1
    command("blacklist", "add", PEER, "--reason", "spam")
    command("blacklist", "add", PEER, "--reason", "spam")
    assert [row["action"] for row in told(command)] == ["blacklist add"]


def test_pages_and_servers(command: Command) -> None:
    """The latest first; those about a server alone."""
    for url in (PEER, "https://b.example", PEER):
        command("deliveries", "hold", url)
    first = command("actions", "list", "--json", "--limit", "2").json
    assert isinstance(first, dict)
    rest = command("actions", "list", "--json", "--after", str(first["after"])).json
    assert isinstance(rest, dict)
    assert [row["server_url"] for row in [*first["actions"], *rest["actions"]]] == [PEER, "https://b.example", PEER]
    assert rest["after"] is None
    assert len(told(command, "--server", "peer.example")) == 2
    assert "deliveries hold" in command("actions", "list").stdout


def test_no_number_is_too_large_for_a_database(command: Command) -> None:
    """It is refused as wrong usage."""
    done = command("actions", "list", "--after", str(2**63))
    assert (done.status, done.stdout, "Traceback" in done.stderr) == (2, "", False)


def test_hostile_arguments_are_stored_and_cannot_control_a_terminal(command: Command) -> None:
    """What was typed may be pasted from anywhere."""
    hostile = "spam\x1b[31m\u202e\x00\ud800" + "x" * 1_000
    arguments = {"text": hostile, "ids": ["i"] * 99}
    order = Order(actor=f"me{hostile}", source=ActionSource.CLI, action="x", arguments=arguments)

    async def act(node: Federation) -> None:
        async with recorded(node.database, order) as record:
            await node.database.transact(lambda connection: record.add(connection, 3))
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        on_the_node(act)
    [row] = told(command)
    assert (row["affected"], row["error"], len(row["actor"])) == (3, "ValueError", 500)
    assert row["arguments"]["ids"][-1] == "and 79 more"
    shown = command("actions", "list").stdout
    assert shown.replace("\n", "").isprintable()


def test_releasing_everything_counts_in_the_transactions_that_release(command: Command) -> None:
    """Without an order, nothing is noted."""
    on_the_node(know)
    on_the_node(lambda node: hold_new(node, 3))
    assert on_the_node(release_all).released == 3
    assert told(command) == []
    on_the_node(lambda node: hold_new(node, 2))
    command("deliveries", "release", "--all")
    assert [(row["arguments"], row["affected"]) for row in told(command)] == [({"all": True}, 2)]


async def hold_new(node: Federation, number: int) -> None:
    await put_on_hold(node, await owe(node, number))
