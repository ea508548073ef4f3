"""The node's own key pairs: read again when the file changes, and replaced whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from federation.base.errors import ConfigurationError
from federation.base.own_keys import begin_rotation, drop_old_pair, own_key_ring
from federation.base.settings.settings import Settings, write_env_file
from federation.protocol.keys import KeyRing, pair_known_by
from federation.protocol.sealing import open_with_any, seal
from tests.federation.protocol.vectors import A, B

pytestmark = pytest.mark.usefixtures("empty_environment")


@pytest.fixture
def file() -> Path:
    """The working directory's `.env`, with the keys of A."""
    path = Path(".env").absolute()
    write_env_file(path, {"BETTER_AUTH_URL": "https://a.example", **A.env})
    return path


def ring() -> KeyRing:
    found = own_key_ring(Settings.load())
    assert found is not None
    return found


def publics(keys: KeyRing) -> list[bytes]:
    return [pair.signing.public for pair in keys.pairs(now=True)]


def test_a_running_process_has_the_new_pair_at_once(file: Path) -> None:
    """The newest comes first; the one before is the old one, until it is dropped."""
    running = ring()
    old = publics(running)

    assert begin_rotation(file)
    new, *rest = publics(running)
    assert rest == old
    assert new not in old
    assert drop_old_pair(file)
    assert publics(running) == [new] == publics(ring())


def test_a_rotation_that_began_meanwhile_keeps_its_old_pair(file: Path) -> None:
    """Who found the one before to be over must not end this one."""
    begin_rotation(file)
    over = ring().pairs()[0].signing.public_text
    drop_old_pair(file)
    begin_rotation(file)

    assert not drop_old_pair(file, newest=over)
    assert len(publics(ring())) == 2


def test_a_rotation_that_was_begun_is_not_begun_again(file: Path) -> None:
    """It goes on with the same keys."""
    begin_rotation(file)
    before = file.read_text()

    assert not begin_rotation(file)
    assert file.read_text() == before
    assert drop_old_pair(file)
    assert not drop_old_pair(file)


def test_everything_else_in_the_file_stays(file: Path) -> None:
    """Comments, other settings and the mode; nothing is left beside it."""
    text = file.read_text()
    file.write_text(f"# mine\nexport FEDERATION_PORT=9\n{text}# the end")
    file.chmod(0o640)

    begin_rotation(file)

    lines = file.read_text().splitlines()
    assert lines[:3] == ["# mine", "export FEDERATION_PORT=9", 'BETTER_AUTH_URL="https://a.example"']
    assert lines[3] == "# the end"
    assert len(lines) == 4 + 8
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [each.name for each in file.parent.glob(".env*")] == [".env"]


def test_a_link_is_followed(file: Path) -> None:
    """Where `.env` is a symbolic link, its target is replaced."""
    target = file.rename(file.with_name("elsewhere.env"))
    file.symlink_to(target)

    begin_rotation(file)

    assert file.is_symlink()
    assert "FEDERATION_OLD_PRIVATE_KEY" in target.read_text()


def test_a_file_that_cannot_be_replaced_is_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on the way leaves nothing but the file before."""
    before = file.read_text()

    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        begin_rotation(file)

    assert file.read_text() == before
    assert [each.name for each in file.parent.glob(".env*")] == [".env"]


def test_keys_in_the_environment_stay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They win over the file, so that nothing may be changed there."""
    for name, value in B.env.items():
        monkeypatch.setenv(name, value)

    assert Settings.load().key_file() is None
    running = ring()
    file.unlink()
    assert publics(running) == [B.keys.signing.public]


def test_a_file_that_holds_no_keys_changes_nothing(file: Path) -> None:
    """Half written by hand, say: the pairs that were read last are in use, and the log names no value."""
    running = ring()
    file.write_text("FEDERATION_PUBLIC_KEY=secret-nonsense\n")

    with capture_logs() as events:
        assert publics(running) == [A.keys.signing.public]
    [told] = [event for event in events if event["event"] == "own_keys_unreadable"]
    assert "FEDERATION_PRIVATE_KEY" in told["problems"]
    assert "secret-nonsense" not in repr(told)


def test_old_keys_that_do_not_fit_are_told_by_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the old pair is not told of the new one."""
    for name, value in A.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FEDERATION_OLD_PRIVATE_KEY", "AAAA")

    with pytest.raises(ConfigurationError) as error:
        Settings.load().key_pairs()

    names = sorted(problem.partition(":")[0] for problem in error.value.problems)
    assert names == [
        "FEDERATION_OLD_ENCRYPTION_PRIVATE_KEY",
        "FEDERATION_OLD_ENCRYPTION_PUBLIC_KEY",
        "FEDERATION_OLD_PRIVATE_KEY",
        "FEDERATION_OLD_PUBLIC_KEY",
    ]


def test_what_is_sealed_to_either_pair_is_opened_by_it(file: Path) -> None:
    """Also by a process that looked at the file a moment before it changed."""
    running = ring()
    begin_rotation(file)
    new, old = ring().pairs()

    for pair in (new, old):
        assert open_with_any(seal("text", pair.encryption.public), running) == ("text", pair)


def test_a_server_knows_one_pair(file: Path) -> None:
    """The one its row names, without a name the older, and of keys that are not here none."""
    running = ring()
    begin_rotation(file)
    new, old = running.pairs(now=True)

    assert pair_known_by(running, new.signing.public_text) == new
    assert pair_known_by(running, old.signing.public_text) == pair_known_by(running, None) == old
    assert pair_known_by(running, B.keys.signing.public_text) is None


def test_no_secret_is_shown(file: Path) -> None:
    """Neither by the ring nor by its pairs."""
    begin_rotation(file)
    running = ring()
    secrets = [line.partition('"')[2].rstrip('"') for line in file.read_text().splitlines() if "PRIVATE" in line]

    assert len(secrets) == 4
    assert not any(secret in repr((running, running.pairs())) for secret in secrets)
