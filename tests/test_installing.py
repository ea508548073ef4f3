"""Who does what the READMEs say has it installed: there is no release, so nothing is had by its name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTALL = re.compile(r"pip3? install (.*)")
FROM_HERE = re.compile(r"""(?:'\.|\$\(echo dist/\*\.whl\))\[([a-z,]+)\]['"]""")
"""The checkout, or a wheel built from it, with extras."""
BY_NAME = re.compile(r"""(?:^|[\s'"])federation[-_]delivery\b""")


def readmes() -> list[Path]:
    """Every Markdown file of the repository."""
    folders = ("db", "docs", "federation", "scripts", "tests", "workers")
    return [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]


def installs() -> list[tuple[Path, str]]:
    """What is installed where, by the READMEs; of each command what comes after `pip install`."""
    return [(path, found[1]) for path in readmes() for found in INSTALL.finditer(path.read_text())]


def test_nothing_of_ours_is_installed_by_name() -> None:
    """An index knows no such name, or somebody else's."""
    assert len(installs()) >= 4
    assert [(path, line) for path, line in installs() if BY_NAME.search(line)] == []


def test_the_readmes_install_from_here() -> None:
    """From the checkout or from a wheel, with extras that there are."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told: dict[str, set[str]] = {}
    for path, line in installs():
        for found in FROM_HERE.findall(line):
            told.setdefault(path.relative_to(ROOT).as_posix(), set()).update(found.split(","))
    assert told["README.md"] == {"node"}
    assert told["docs/deploy/README.md"] == {"bullmq", "metrics", "node", "postgres"}
    assert set[str]().union(*told.values()) <= extras.keys()
