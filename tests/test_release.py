"""What `scripts/release` says of a release, and what it refuses. That it builds one is seen when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
CHANGES = "# Changelog\n\n## Unreleased\n\n## 2.0.0 - 2026-01-02\n\n**Upgrade:** do.\n\n## 1.0.0 - 2026-01-01\n\nold\n"


@pytest.fixture(scope="module")
def release() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        patch.syspath_prepend(ROOT / "workers")
        yield importlib.import_module("release")


def test_the_tag_tells_of_its_release(release: ModuleType) -> None:
    assert release.announcement(CHANGES, "2.0.0") == "**Upgrade:** do."
    assert release.announcement(CHANGES, "1.0.0") == "old"


@pytest.mark.parametrize(
    ("changes", "told"),
    [(CHANGES, "no section `## 3.0.0"), (CHANGES.replace("Unreleased\n", "Unreleased\n\nnew\n"), "under Unreleased")],
)
def test_a_release_that_says_nothing_is_refused(release: ModuleType, changes: str, told: str) -> None:
    """It has no section; or there are lines that belong to none."""
    with pytest.raises(release.Broken, match=told):
        release.announcement(changes, "3.0.0")


def test_builds_that_differ_are_refused(release: ModuleType, tmp_path: Path) -> None:
    for build, content in (("once", b"1"), ("again", b"2")):
        (tmp_path / build).mkdir()
        for name in ("a.tar.gz", "a.whl"):
            (tmp_path / build / name).write_bytes(content)
    once, again = (sorted((tmp_path / build).iterdir()) for build in ("once", "again"))
    release.same(once, once)
    with pytest.raises(release.Broken, match=r"differ in a\.tar\.gz"):
        release.same(once, again)
    with pytest.raises(release.Broken, match="two builds made"):
        release.same(once, once[:1])


def test_every_python_that_is_here_is_tried(release: ModuleType) -> None:
    """The one that runs this is among them, and none that is too old."""
    found = release.pythons()
    assert any(Path(path).exists() for path in found.values())
    assert all(int(version.removeprefix("3.")) >= 11 for version in found)
