"""CHANGELOG.md in the form of Keep a Changelog, and ready for the version that `pyproject.toml` names."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CHANGELOG.md").read_text()
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def releases() -> dict[str, str]:
    """What is written below each heading of a version, by the heading."""
    parts = re.split(r"^## (.+)$", TEXT, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_newest_release_is_the_version_of_the_package() -> None:
    """Below what is not released yet; each with the day it was made."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    unreleased, *versions = releases()
    assert unreleased == "Unreleased"
    assert versions[0].partition(" - ")[0] == version
    assert [date.fromisoformat(each.partition(" - ")[2]) for each in versions]


def test_every_line_has_its_kind() -> None:
    """In the order of Keep a Changelog, each once a release; nothing stands beside them but a preface."""
    for release, text in releases().items():
        preface, *parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
        assert "\n- " not in preface, release
        assert [kind for kind in KINDS if kind in parts[::2]] == parts[::2], release
        assert all("\n- " in entries for entries in parts[1::2]), release
