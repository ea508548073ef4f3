"""`federation keys rotate`, as an operator sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from federation.base.settings.settings import write_env_file
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import PEER, know, on_the_node
from tests.federation.protocol.vectors import A


@pytest.fixture
def keys_in_file(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The node has its keys from `.env`, and knows a peer that nobody reaches."""
    for name in A.env:
        monkeypatch.delenv(name)
    write_env_file(Path(".env"), A.env)
    on_the_node(know)
    return command


def test_who_has_not_confirmed_is_listed(keys_in_file: Command) -> None:
    """With the reason, and status 1; running it again goes on with the same keys."""
    first = keys_in_file("keys", "rotate")
    text = Path(".env").read_text()
    again = keys_in_file("keys", "rotate")

    assert (first.status, again.status) == (1, 1)
    assert PEER in first.stdout
    assert "0 of 1 servers know the new keys" in first.stdout
    assert "FEDERATION_OLD_PRIVATE_KEY" in text
    assert Path(".env").read_text() == text


def test_the_old_keys_are_forgotten_when_told(keys_in_file: Command) -> None:
    """Whoever knows them alone is told of before, and nothing is done without a yes."""
    keys_in_file("keys", "rotate")
    refused = keys_in_file("keys", "rotate", "--forget-old")
    done = keys_in_file("keys", "rotate", "--forget-old", "--yes")

    assert refused.status == 1
    assert "alone: 1." in refused.stderr
    assert (done.status, "1 of 1" in done.stdout) == (0, True)
    assert "OLD" not in Path(".env").read_text()


def test_no_secret_is_printed(keys_in_file: Command) -> None:
    """Neither of the old keys nor of the new ones."""
    done = keys_in_file("keys", "rotate", "--json")
    lines = Path(".env").read_text().splitlines()
    secrets = [line.partition('"')[2].rstrip('"') for line in lines if "PRIVATE" in line]

    assert len(secrets) == 4
    assert not any(secret in done.stdout + done.stderr for secret in secrets)


def test_a_server_that_nobody_knows_is_not_asked(keys_in_file: Command) -> None:
    """Status 1, and no rotation is begun."""
    done = keys_in_file("keys", "rotate", "--only", "stranger.example")

    assert (done.status, "not in the registry" in done.stderr) == (1, True)
    assert "OLD" not in Path(".env").read_text()


def test_keys_in_the_environment_need_a_restart(command: Command) -> None:
    """What to set is told; status 2."""
    done = command("keys", "rotate")

    assert done.status == 2
    assert "FEDERATION_OLD_PUBLIC_KEY" in done.stderr
    assert "restart" in done.stderr
