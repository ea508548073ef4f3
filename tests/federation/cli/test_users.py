"""`federation users`, and the tables of a host that `init` and `upgrade --host-tables` make where there is none."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from db.migrate import upgrade
from federation.protocol.keys import generate_own_keys
from tests.federation.cli.conftest import Command
from tests.federation.conftest import alter


@pytest.fixture
def on_each(command: Command, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Command:
    """Commands of a node on a migrated database without a host's tables; on both kinds."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    return command


def test_users_are_added_and_listed(on_each: Command, database_url: str) -> None:
    """By id, a page at a time; one that is there stays as it is."""
    upgrade(database_url, host_tables=True)
    added = on_each("users", "add", "bob", "--private", "--posts-to", "followers", "--json")
    bob = {"id": "bob", "is_private": True, "post_propagation_policy": "followers"}
    assert (added.status, added.json) == (0, bob)
    assert on_each("users", "add", "alice").stdout == "added: alice, public, posts to all\n"
    again = on_each("users", "add", "bob")
    assert (again.status, again.stdout) == (1, "")
    assert "a user bob already" in again.stderr
    alice = {"id": "alice", "is_private": False, "post_propagation_policy": "all"}
    assert on_each("users", "list", "--json").json == {"users": [alice, bob], "after": None}
    assert on_each("users", "list", "-n", "1", "--json").json == {"users": [alice], "after": "alice"}
    assert on_each("users", "list", "--after", "alice", "--json").json == {"users": [bob], "after": None}
    assert on_each("users", "list").stdout.splitlines()[2].split() == ["bob", "yes", "followers"]


@pytest.mark.parametrize("arguments", [["add", "alice"], ["list"]], ids=" ".join)
def test_without_a_table_of_users_it_is_named(on_each: Command, arguments: list[str]) -> None:
    """With what makes it, and never as an outage."""
    done = on_each("users", *arguments)
    assert (done.status, done.stdout) == (2, "")
    assert "lacks user: " in done.stderr
    assert "`federation upgrade --host-tables`" in done.stderr


def test_users_of_a_host_are_its_own_to_add(on_each: Command, database_url: str) -> None:
    """Half of one would be worse than none; they are listed all the same, whatever null means."""
    upgrade(database_url, host_tables=True)
    alter(
        database_url,
        'ALTER TABLE "user" ADD COLUMN email text',
        "INSERT INTO \"user\" (id, is_private, post_propagation_policy) VALUES ('h', NULL, NULL)",
    )
    done = on_each("users", "add", "alice")
    assert done.status == 2
    assert "a host application's own (it has email)" in done.stderr
    listed = [{"id": "h", "is_private": False, "post_propagation_policy": "all"}]
    assert on_each("users", "list", "--json").json == {"users": listed, "after": None}


@pytest.mark.parametrize("user_id", ["", "  ", "a\nb", "x" * 513])
def test_an_id_that_no_activity_can_carry_is_refused(on_each: Command, user_id: str) -> None:
    done = on_each("users", "add", user_id)
    assert (done.status, done.stdout) == (2, "")
    assert "printable" in done.stderr


def test_upgrade_makes_the_hosts_tables_if_it_is_told_to(on_each: Command) -> None:
    """Else it says that they are missing, which is no failure: the host may make them later."""
    nothing = on_each("upgrade", "--json")
    missing = ["blocks", "posts", "user"]
    assert (nothing.status, nothing.json) == (0, {"host_tables_made": [], "host_missing": missing})
    assert "lacks the host application's blocks, posts, user: " in on_each("db", "upgrade").stdout
    made = on_each("upgrade", "--host-tables")
    assert made.status == 0
    assert "made minimal host tables: " in made.stdout
    assert on_each("db", "upgrade", "--json").json == {"host_tables_made": [], "host_missing": []}


def test_upgrade_never_touches_a_hosts_own_table(on_each: Command, database_url: str) -> None:
    """Status 1 where it is asked for the tables, and one stays without a column."""
    alter(database_url, 'CREATE TABLE "user" (id text PRIMARY KEY, is_private boolean)')
    done = on_each("upgrade", "--host-tables", "--json")
    assert done.status == 1
    assert isinstance(done.json, dict)
    assert (sorted(done.json["host_tables_made"]), done.json["host_missing"]) == (
        ["blocks", "posts"],
        ["user.post_propagation_policy"],
    )


def test_a_host_in_the_way_is_told_in_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, migrated_postgres_url: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", migrated_postgres_url)
    alter(migrated_postgres_url, 'CREATE TABLE "user" (id integer PRIMARY KEY)')
    done = command("upgrade", "--host-tables")
    assert (done.status, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "beside the host's own (DatatypeMismatch); nothing was changed" in done.stderr


@pytest.mark.parametrize("made_by", ["nobody", "a host", "an empty file"])
def test_init_makes_them_only_in_a_file_of_its_own(
    empty_environment: Path, command_anywhere: Command, made_by: str
) -> None:
    """A file with anything in it is somebody's; one of no bytes is what a look at no database leaves."""
    file = empty_environment / "federation.sqlite3"
    if made_by == "a host":
        with closing(sqlite3.connect(file)) as connection:
            connection.execute('CREATE TABLE "user" (id text PRIMARY KEY, email text)')
    elif made_by == "an empty file":
        file.touch()
    done = command_anywhere("init", "--json")
    assert done.status == 0
    assert isinstance(done.json, dict)
    mine = made_by != "a host"
    assert (done.json["wrote_env"], bool(done.json["host_tables_made"])) == (True, mine)
    assert bool(done.json["host_missing"]) is not mine
    again = command_anywhere("init")
    assert (again.status, "stays as it is" in again.stdout) == (0, True)
    assert ("--host-tables" in again.stdout) is not mine


def test_init_leaves_a_servers_database_to_its_host(
    empty_environment: Path, command_anywhere: Command, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    """It did not create that, empty though it is."""
    monkeypatch.setenv("DATABASE_URL", postgres_url)
    for name, value in generate_own_keys().to_env().items():
        monkeypatch.setenv(name, value)
    done = command_anywhere("init", "--json")
    assert done.status == 0
    assert isinstance(done.json, dict)
    assert (done.json["host_tables_made"], done.json["host_missing"]) == ([], ["blocks", "posts", "user"])
