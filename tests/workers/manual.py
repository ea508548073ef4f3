"""The examples of the manual, and fresh processes that run them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests import warm
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "workers" / "README.md"
RECIPES = ROOT / "workers" / "recipes.md"
TRACES = ROOT / "docs" / "opentelemetry.md"
DEPENDENCIES, ENQUEUEING, FAILED, HANDLERS, STORAGES, TASKS = (
    ROOT / "docs" / "queue" / f"{page}.md"
    for page in ("dependencies", "enqueueing", "failed", "handlers", "storages", "tasks")
)


TITLE_OR_BLOCK = re.compile(r"^#+ (?P<title>[^\n]+)$|^```(?P<language>\w*)\n(?P<code>.*?)^```", re.S | re.M)


def examples(page: Path) -> Mapping[str, str]:
    """The first Python block of each section that has one, by the section's title."""
    found: dict[str, str] = {}
    title = ""
    for match in TITLE_OR_BLOCK.finditer(page.read_text()):
        title = match["title"] or title
        if match["language"] == "python":
            found.setdefault(title, match["code"])
    return found


def run_example(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The code ran in a fresh process without a warning."""
    finished = subprocess.run(
        [warm.PYTHON, "-c", code],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished
