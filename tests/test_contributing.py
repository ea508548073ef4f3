"""The list for a new storage in CONTRIBUTING.md, followed for a toy in a copy of this tree; and what the lists name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
TEXT: Final = (ROOT / "CONTRIBUTING.md").read_text()
COPIED: Final = ("workers", "federation", "db", "tests", "scripts", "pyproject.toml")

TOY: Final = '''"""Jobs in this process, found again by the URL they were enqueued on."""

from typing import Final

from workers.storage.memory import MemorySpace, MemoryStorage

_spaces: Final[dict[str, MemorySpace]] = {}


class ToyStorage(MemoryStorage):
    """One queue in the space that belongs to a URL."""

    def __init__(self, url: str, queue: str = "default") -> None:
        super().__init__(_spaces.setdefault(url, MemorySpace()), queue)
'''
ROOM: Final = """
[[tool.importlinter.contracts]]
name = "the inside of toy/ is its own"
type = "protected"
protected_modules = ["workers.storage.toy.*"]
allowed_importers = ["workers.storage.toy"]
"""
HARNESS: Final = """
@asynccontextmanager
async def toy(case: Case, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    async with UrlHarness(f"toy://{case.id}") as harness:
        yield harness


HARNESSES["toy"] = toy
"""


class Tree:
    """A copy of this tree, to be changed and run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "node_modules", ".*")
                shutil.copytree(ROOT / name, path / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, path / name)

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_text(text)

    def change(self, name: str, changes: Mapping[str, str]) -> None:
        """Replace each text, which is there once."""
        text = (self.path / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
            text = text.replace(old, new)
        (self.path / name).write_text(text)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What `python` does in the copy, which is found before the installed packages."""
        environment = {**os.environ, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    def contracts(self) -> subprocess.CompletedProcess[str]:
        return self.run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


def items(title: str) -> list[str]:
    """The points of the list under that title."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None
    return re.findall(r"^\d+\. (.*?)(?=^\d+\. |\Z)", found[1], re.DOTALL | re.MULTILINE)


def test_a_seventh_storage_finds_its_place(tmp_path: Path) -> None:
    """Each point of the list is taken in its order, and what a point is there for fails as long as it is not."""
    place, url, contracts, certify, tests, *rest = items("Add a storage")
    tree = Tree(tmp_path)

    assert "workers/storage/<name>/" in place
    tree.write("workers/storage/toy/storage.py", TOY)
    tree.write(
        "workers/storage/toy/__init__.py",
        '"""A toy."""\n\nfrom workers.storage.toy.storage import ToyStorage\n\n__all__ = ["ToyStorage"]\n',
    )

    assert "`SCHEMES` in `workers/storage/urls.py`" in url
    unknown = tree.run("-m", "workers.testing", "toy://box", "--case", "enqueue.")
    assert unknown.returncode != 0
    tree.change(
        "workers/storage/urls.py", {'    "sqlite": _of(': '    "toy": _of("toy", "ToyStorage"),\n    "sqlite": _of('}
    )

    assert "two contracts of `pyproject.toml`" in contracts
    refused = tree.contracts()
    assert refused.returncode != 0
    assert "workers.storage.toy" in refused.stdout
    tree.change(
        "pyproject.toml", {'"bull | bullmq | file | redis | sql",': '"bull | bullmq | file | redis | sql | toy",'}
    )
    (tree.path / "pyproject.toml").write_text((tree.path / "pyproject.toml").read_text() + ROOM)
    kept = tree.contracts()
    assert kept.returncode == 0, kept.stdout

    assert "`python -m workers.testing <scheme>://...`" in certify
    certified = tree.run("-m", "workers.testing", "toy://box", "--case", "enqueue.")
    assert certified.returncode == 0, certified.stdout

    assert "`HARNESSES` in `tests/workers/harnesses.py`" in tests
    tree.change(
        "tests/workers/harnesses.py",
        {
            "import FILLS, FREEZES, RESTARTS, SWALLOWS\n": "import FILLS, FREEZES, RESTARTS, SWALLOWS\n"
            "from workers.testing.url_harness import UrlHarness\n"
        },
    )
    harnesses = tree.path / "tests" / "workers" / "harnesses.py"
    harnesses.write_text(harnesses.read_text() + HARNESS)
    suite = "tests/workers/testing/test_conformance.py"
    run = tree.run("-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", suite, "-k", "enqueue and toy")
    assert run.returncode == 0, run.stdout
    assert len(rest) == 3, "the list has a point that this test does not take"


@pytest.mark.parametrize("title", ["Add a storage", "Add a setting", "Add a column", "Add a failure code"])
def test_what_the_lists_name_is_there(title: str) -> None:
    """Files and folders exist, and a name that a list says to be in a file is in it."""
    text = " ".join(items(title)).replace("\n", " ")
    paths = set(re.findall(r"`([\w./]+/[\w./]*)`", text))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    places = re.findall(r"`(\w+)`(?: [^`.;]{0,20})? (?:in|of) `([\w./]+)`", text)
    assert [name for name, path in places if name not in (ROOT / path).read_text()] == []
