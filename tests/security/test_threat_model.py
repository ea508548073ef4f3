"""`SECURITY.md` promises nothing that no test holds."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", PAGE)))
LINES = [line for line in PAGE.splitlines() if line.count("|") == 4 and not line.startswith(("| Cannot", "| ---"))]


@cache
def files() -> dict[str, list[Path]]:
    found = defaultdict(list)
    for file in (ROOT / "tests").rglob("test_*.py"):
        found[file.name].append(file)
    return found


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_named_test_is_there(file: str, test: str) -> None:
    """In a file of that name."""
    texts = [path.read_text(encoding="utf-8") for path in files()[file]]
    assert texts
    assert any(re.search(rf"def {test}\(", text) for text in texts) or not test


@pytest.mark.parametrize("line", LINES)
def test_every_line_names_its_test(line: str) -> None:
    """In its last column."""
    assert re.search(r"`test_\w+\.py(::test_\w+)?` \|$", line)
