"""The visual language that dashboards share with the report of the analytics."""

from __future__ import annotations

import re
from pathlib import Path

import federation.analytics.report
import workers.dashboard
from tests.workers.dashboard.browsing import Person
from workers.dashboard.site import Site

STATIC = Path(workers.dashboard.__file__).parent / "static"
REPORT = Path(federation.analytics.report.__file__).parent / "templates"


def test_colours_are_in_one_file() -> None:
    """For the light and for the dark; only for paper the report has others."""
    palettes = re.findall(r"--paper: #\w+;", (STATIC / "palette.css").read_text())
    assert len(palettes) == 2
    for sheet in (STATIC / "visual.css", STATIC / "dashboard.css"):
        assert "--paper: " not in sheet.read_text()
    assert (REPORT / "report.css").read_text().count("--paper: ") == 1
    assert '"palette.css"' in (REPORT / "report.html").read_text()


async def test_pages_load_the_colours_first(acting: Site) -> None:
    """What comes behind uses them."""
    person = Person(acting.app)
    sheets = re.findall(r'<link rel="stylesheet" href="(/static/\w+/(\w+\.css))">', await person.sees("/queues"))
    assert [name for _, name in sheets] == ["palette.css", "visual.css", "dashboard.css"]
    for address, _ in sheets:
        assert (await person.client.get(address)).headers["content-type"].startswith("text/css")
