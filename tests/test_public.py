"""What is public is what the page says, so that nothing of it goes unnoticed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

from tests.public import MODULES, page
from tests.test_manual import manual

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "public.md"
OURS = ("federation", "workers")
INSIDE = {"workers.storage.base.Capabilities", "workers.storage.base.Storage"}
"""What a storage of one's own is made of, which is not public."""


def test_the_page_lists_what_is_public() -> None:
    """Where it does not: `python -m tests.public > docs/reference/public.md`.

    A line that goes is a broken promise, which waits for a major version and stands under **Upgrade** in the changelog.
    """
    changed = "\n".join(unified_diff(PAGE.read_text().splitlines(), page().splitlines(), "the page", "the code", n=0))
    assert changed == ""


def test_what_the_manual_has_programs_import_is_public() -> None:
    """Its blocks and its examples: who copies them depends on these names. `MORE` takes a new one."""
    public = {line.partition("(")[0].partition(":")[0] for line in page().splitlines()}
    imported = {name for text in programs() for name in imports(text)}
    assert len(imported) > 40
    assert sorted(imported - public - INSIDE - {*MODULES}) == []


def programs() -> Iterator[str]:
    """Those of the pages for who uses the packages, and not for who changes them."""
    for name in manual.pages():
        if name.startswith("docs/") or name in ("README.md", "workers/README.md", "workers/recipes.md"):
            yield from (block.text for block in manual.blocks(name) if block.language == "python")
    yield from (path.read_text() for path in (ROOT / "docs").rglob("*.py"))


def imports(text: str) -> Iterator[str]:
    """What a program imports of ours, by full names; one of questions and answers is left out."""
    for node in ast.walk(ast.parse("" if text.startswith(">>>") else text)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in OURS:
                yield from (f"{module}.{each.name}" for each in names)
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.partition(".")[0] in OURS)
