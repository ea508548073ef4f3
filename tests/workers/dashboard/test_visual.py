"""The visual language that dashboards share with the report of the analytics."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def palettes(file: Path) -> list[dict[str, str]]:
    """The colours of a style sheet, by name: in the light first, then in the dark."""
    blocks = re.findall(r":root \{([^}]*--paper[^}]*)\}", file.read_text())
    return [dict(re.findall(r"--(\w+): (#\w+);", block)) for block in blocks]


def test_dashboards_and_the_report_have_the_same_colours() -> None:
    """Neither package imports the other; this keeps the two style sheets together."""
    ours = palettes(ROOT / "workers" / "dashboard" / "static" / "visual.css")
    report = palettes(ROOT / "federation" / "analytics" / "report" / "report.css")
    assert len(ours) == 2
    assert ours == report[:2]
