"""The pictures in `docs/` are those that `scripts/screenshots` takes, each is shown, and none is large."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "dashboard"
LARGEST_BYTES = 150_000


def test_every_picture_is_taken_by_the_script_and_shown() -> None:
    """By its name, in the light or in the dark."""
    there = {path.stem for path in PICTURES.glob("*.png")}
    taken = set(re.findall(r'Shot\(name="([^"]+)"', (ROOT / "scripts" / "screenshots.py").read_text()))
    shown = set(re.findall(r"\]\(dashboard/([^)]+)\.png\)", (ROOT / "docs" / "dashboard.md").read_text()))
    assert there == taken == shown
    assert any(name.endswith("-dark") for name in there)


def test_no_picture_is_large() -> None:
    """Whoever clones the repository gets them all."""
    for path in PICTURES.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < LARGEST_BYTES
