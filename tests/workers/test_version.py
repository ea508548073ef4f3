"""Each commit has a version of its own, and whoever has no history says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workers import version as versions
from workers.version import BASE, of_commit, version

ROOT = Path(__file__).parents[2]
UNKNOWN = f"{BASE}.dev0+unknown"


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@a.example", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with three commits."""
    path = tmp_path / "checkout"
    path.mkdir()
    git(path, "init", "--quiet")
    for number in range(3):
        git(path, "commit", "--quiet", "--allow-empty", "--message", str(number))
    return path


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.GIVEN, raising=False)


def test_a_commit_is_called_by_its_number_and_its_name(checkout: Path) -> None:
    """The next one by the next number."""
    before = of_commit(checkout)
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "next")
    after = of_commit(checkout)
    name = git(checkout, "rev-parse", "HEAD")[:8]
    assert (before.partition("+")[0], after) == (f"{BASE}.dev3", f"{BASE}.dev4+g{name}")


def test_a_release_has_the_bare_number(checkout: Path) -> None:
    """Its tag says so, and no other does."""
    git(checkout, "tag", "v0.0.1")
    assert of_commit(checkout) != BASE
    git(checkout, "tag", "--annotate", f"v{BASE}", "--message", BASE)
    assert of_commit(checkout) == BASE


def test_a_part_of_the_history_has_no_number(checkout: Path, tmp_path: Path) -> None:
    """It would be one of an older commit."""
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{checkout}", "shallow")
    assert of_commit(tmp_path / "shallow") == f"{BASE}.dev0+g{git(checkout, 'rev-parse', 'HEAD')[:8]}"


def test_without_history_the_version_is_unknown(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bare folder, in one within somebody else's repository, and where there is no git."""
    (checkout / "unpacked").mkdir()
    git(checkout, "tag", f"v{BASE}")
    assert of_commit(tmp_path) == of_commit(checkout / "unpacked") == UNKNOWN
    monkeypatch.setenv("PATH", str(tmp_path))
    assert of_commit(checkout) == UNKNOWN


def test_a_build_may_be_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an image, which sees no history; nothing is no version."""
    monkeypatch.setenv(versions.GIVEN, "")
    assert of_commit(checkout).startswith(f"{BASE}.dev3+g")
    monkeypatch.setenv(versions.GIVEN, "1.2.3")
    assert of_commit(checkout) == "1.2.3"


def test_this_checkout_says_its_own_version() -> None:
    """By the command of the queue, and by the file alone, which the build runs."""
    told = [
        subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for words in (("-m", "workers", "--version"), ("workers/version.py",))
    ]
    assert told == [f"workers {version()}\n", f"{of_commit()}\n"]


def test_a_copied_folder_says_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or that nothing is, in a project of somebody else's."""
    monkeypatch.setattr(versions, "_ROOT", tmp_path)
    monkeypatch.setattr(versions, "DISTRIBUTION", "no-such-distribution")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "shop"\n')
    assert version() is None
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(versions, "_ROOT", tmp_path)
    assert version() == of_commit(tmp_path) == UNKNOWN
