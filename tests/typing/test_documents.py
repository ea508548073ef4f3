"""The programs of the documents are typed: neither mypy nor pyright has anything to say of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGES = [ROOT / "README.md", *(ROOT / "workers").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
UNTYPED = {"activitypub_django.py", "django_app.py", "testing.md"}
"""Django has no types of its own, and tests with fixtures are written without."""


def _blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page, but those of other queues' programs, which need other environments."""
    others = {path.read_text().strip() for path in (page.parent / page.stem).glob("old*.py")}
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    return [block for block in found if block.strip() not in others]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of them all, each named after its page."""
    folder = tmp_path_factory.mktemp("programs")
    for page in PAGES:
        if page.name in UNTYPED:
            continue
        name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
        for number, block in enumerate(_blocks(page), 1):
            (folder / f"{name}_{number}.py").write_text(block)
    for path in [*EXAMPLES.rglob("*.py"), *(ROOT / "docs" / "migration").glob("*/new*.py")]:
        if path.name not in UNTYPED:
            (folder / f"{path.parent.name}_{path.name}").write_text(path.read_text())
    return folder


def test_mypy_is_silent(programs: Path) -> None:
    """By the strict settings of this repository."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    told = _told([*command, "--cache-dir", str(ROOT / ".mypy_cache"), *map(str, sorted(programs.glob("*.py")))])
    assert [line for line in told.splitlines() if programs.name in line] == []


def test_pyright_is_silent(programs: Path) -> None:
    """By its standard settings, as an editor has them."""
    settings = {"typeCheckingMode": "standard", "pythonVersion": "3.11", "extraPaths": [str(ROOT), str(EXAMPLES)]}
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--project", str(programs), "--pythonpath", sys.executable]
    assert _told(command).strip().splitlines()[-1] == "0 errors, 0 warnings, 0 notes"


def _told(command: list[str]) -> str:
    path = f"{ROOT}:{EXAMPLES}"
    done = subprocess.run(
        command, cwd=ROOT, env={"MYPYPATH": path, "PATH": ""}, capture_output=True, text=True, timeout=280, check=False
    )
    print(done.stdout, done.stderr)
    return done.stdout
