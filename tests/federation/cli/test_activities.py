"""`federation follow`, `post` and `received`, on a node without an application."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from db.migrate import upgrade
from federation.runtime.composition import Federation
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import PEER, know, live_without_a_host, on_the_node, received_post, rows_of
from tests.servers import free_port


@pytest.fixture
def on_each(command: Command, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Command:
    """Commands of a node that knows the peer, and has the tables of a host; on both kinds of database."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    on_the_node(know)
    upgrade(database_url, host_tables=True)
    return command


def test_a_follow_is_owed(on_each: Command) -> None:
    """As an application's `request_follow`; a server that nobody knows is asked who it is, and says nothing here."""
    live_without_a_host(on_each)
    done = on_each("follow", "dave", "peer.example", "--as", "carol")
    [(delivery, row)] = on_the_node(rows_of).items()
    assert done.stdout == (
        f"carol asks to follow dave of {PEER}; `federation deliveries show {delivery}` tells what becomes of it\n"
    )
    assert (done.status, row.server_url, row.job_name) == (0, PEER, "deliver-follow")
    absent = on_each("follow", "dave", f"http://127.0.0.1:{free_port()}", "--as", "carol")
    assert (absent.status, absent.stdout, absent.stderr.count("\n")) == (1, "", 1)
    assert len(on_the_node(rows_of)) == 1


def test_a_post_is_owed_to_the_servers_of_followers(on_each: Command) -> None:
    """And where there are none, that is said."""
    live_without_a_host(on_each)
    assert on_each("post", "hello", "--as", "carol").stdout.endswith("; owed to 1 server\n")
    assert [row.server_url for row in on_the_node(rows_of).values()] == [PEER]
    on_each("users", "add", "erin")
    told = on_each("post", "hello", "--as", "erin", "--private").stdout
    assert told.endswith("; no server is to have it\n")
    assert on_each("received", "--json").json == on_each("received", "--json", "-n", "1").json
    empty = on_each("post", "", "--as", "carol")
    assert (empty.status, empty.stdout) == (2, "")
    assert "a post must say something" in empty.stderr


def test_what_came_is_listed_the_latest_first(on_each: Command) -> None:
    """A page at a time; what is no text by where it is, and nothing can control the terminal."""
    live_without_a_host(on_each)
    now = datetime.now(UTC)

    async def arrive(node: Federation) -> None:
        async with node.database.transaction() as session:
            image = {"type": "image", "url": "https://peer.example/1.png", "size": 3, "index": 0}
            session.add(received_post("second", now + timedelta(seconds=1), image))
            session.add(received_post("third\x1b[31m", now + timedelta(seconds=2)))

    on_the_node(arrive)
    first: Any = on_each("received", "--json", "-n", "1").json
    rest: Any = on_each("received", "--json", "--after", first["after"]).json
    assert [post["id"] for post in first["posts"] + rest["posts"]] == ["third\x1b[31m", "second", "of bob"]
    assert rest["after"] is None
    unknown = on_each("received", "--after", "fourth")
    assert (unknown.status, unknown.stdout) == (1, "")
    assert unknown.stderr == "federation: there is no post 'fourth' here; begin without --after\n"
    shown = on_each("received").stdout
    assert shown.replace("\n", "").isprintable()
    assert shown.splitlines()[2].split()[2:] == ["bob", PEER, "second", "[image:", "https://peer.example/1.png]"]


@pytest.mark.parametrize("arguments", [["follow", "bob", PEER], ["post", "hello"]], ids="-".join)
def test_only_a_user_of_this_node_does_anything(on_each: Command, arguments: list[str]) -> None:
    """Not one whose name was mistyped."""
    done = on_each(*arguments, "--as", "nobody")
    assert (done.status, done.stdout) == (1, "")
    assert done.stderr == "federation: there is no user 'nobody' here; `federation users list` shows who is\n"


@pytest.mark.parametrize("arguments", [["follow", "b", PEER, "--as", "a"], ["post", "x", "--as", "a"], ["received"]])
def test_tables_that_are_missing_are_named(command: Command, arguments: list[str]) -> None:
    """With the option that makes them."""
    done = command(*arguments)
    assert (done.status, done.stdout) == (2, "")
    assert "`federation upgrade --host-tables`" in done.stderr
