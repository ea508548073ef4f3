"""What is public is what the page says, so that nothing of it goes unnoticed."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

from tests.public import page

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "public.md"


def test_the_page_lists_what_is_public() -> None:
    """Where it does not: `python -m tests.public > docs/reference/public.md`.

    A line that goes is a broken promise, which waits for a major version and stands under **Upgrade** in the changelog.
    """
    changed = "\n".join(unified_diff(PAGE.read_text().splitlines(), page().splitlines(), "the page", "the code", n=0))
    assert changed == ""
