"""`federation servers`: listed, shown with their links and scorecards, and forgotten."""

from __future__ import annotations

import re
from datetime import date

from db import (
    Database,
    ServerScorecard,
)
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import PEER, fall, know, on_the_node, owe


def test_servers_are_listed_shown_and_forgotten(command: Command) -> None:
    """Forgetting asks first; who is not there is told with status 1."""
    on_the_node(lambda node: know(node, reason="TIMEOUT"))
    assert PEER in command("servers", "list", "--unhealthy").stdout
    assert PEER not in command("servers", "list", "--healthy").stdout
    assert "TIMEOUT" in command("servers", "show", "peer.example").stdout
    assert command("servers", "forget", PEER).status == 1
    assert command("servers", "forget", PEER, "--yes").status == 0
    for verb in (["show"], ["probe"], ["forget", "--yes"]):
        assert command("servers", *verb, PEER).status == 1


def test_servers_are_shown_with_their_link(command: Command) -> None:
    """Its state, cause, next probe and what is held; also of a server that nobody has discovered yet."""
    on_the_node(lambda node: fall(node, "TIMEOUT"))
    assert re.search("registry +not in it", command("servers", "show", PEER).stdout)
    on_the_node(know)
    (each,) = on_the_node(lambda node: owe(node, 1))
    *_, row = command("servers", "list", "--wide").stdout.splitlines()
    assert (row.split()[1], row.split()[4:6]) == ("down", ["TIMEOUT", "1"])
    listed = command("servers", "list", "--json").json
    assert isinstance(listed, dict)
    link = listed["links"][PEER]
    assert (link["state"], link["held"], link["operator_hold"], each != "") == ("down", 1, False, True)
    assert command("servers", "set", PEER, "--profile", "original").status == 0
    shown = command("servers", "show", PEER, "--json").json
    assert isinstance(shown, dict)
    assert (shown["is_healthy"], shown["link"]["profile"]) == (True, "original")
    assert command("servers", "set", PEER, "--profile", "none").status == 0
    assert re.search("profile +-", command("servers", "show", PEER).stdout)


def test_only_the_true_reason_is_shown(command: Command) -> None:
    """The registry has another for a code of the link that the original does not know."""
    on_the_node(know)
    on_the_node(lambda node: fall(node, "HTTP_502"))
    shown = command("servers", "show", PEER).stdout
    assert re.search("reason +HTTP_502", shown)
    assert re.search("unhealthy because +-", shown)


def test_servers_are_listed_with_the_scorecards_of_the_analytics(command: Command) -> None:
    """The score of seven days and the advice; neither where there are none. `why` has it all."""
    on_the_node(know)
    before = command("servers", "list", "--json").json
    on_the_node(lambda node: judge(node.database))
    *_, row = command("servers", "list", "--wide").stdout.splitlines()
    listed, explained = command("servers", "list", "--json").json, command("why", PEER, "--json").json

    assert row.split()[-2:] == ["43", "watch"]
    assert isinstance(before, dict)
    assert isinstance(listed, dict)
    assert isinstance(explained, dict)
    card = listed["scorecards"][PEER]
    assert (card["score"], card["action"], card["as_of"]) == (43.2, "watch", "2026-01-02")
    assert (before["scorecards"], explained["scorecard"]) == ({}, card)


async def judge(database: Database) -> None:
    """The analytics have a scorecard of the peer's last week, and one of its last month."""
    async with database.transaction() as session:
        for window_days, score, action in ((7, 43.2, "watch"), (30, 99.0, "keep")):
            session.add(
                ServerScorecard(
                    server_url=PEER,
                    window_days=window_days,
                    as_of=date(2026, 1, 2),
                    generation=1,
                    attempts=10,
                    delivered=4,
                    score=score,
                    action=action,
                    reasons=["under 90 % delivered"],
                )
            )
