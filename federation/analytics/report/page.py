"""The report: one HTML file that needs nothing else, no network, no scripts, and lists unhealthy servers first.

What it says is in `templates`, a file for each of its parts; here is what they are given.
"""

from __future__ import annotations

import re
from datetime import UTC
from functools import cache
from typing import TYPE_CHECKING, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from federation.analytics import REPORT_FILE
from federation.analytics.data.results import write_text
from federation.analytics.days import DAY
from federation.analytics.report import advice, attention, comparison, network_charts, wording
from federation.analytics.report.charts import strip
from federation.analytics.report.findings import BAD_DAY, DAYS, HELD_FOR, MOST_WITH_DAYS
from federation.analytics.report.markup import printable

if TYPE_CHECKING:
    from datetime import datetime

    from federation.analytics.data.snapshots import Place
    from federation.analytics.report.findings import Findings

_CARDS: Final = 4
"""So many servers of each advice are told at length."""
_PAGE: Final = 100
"""So many lines of a long list are opened at once."""

_BETWEEN: Final = re.compile(r"(?<=>)\s*\n\s*(?=<)")
_BREAK: Final = re.compile(r"\s*\n\s*")
"""Of a template: a stranger's text has none, see `printable`."""


def write_page(page: str, out: Place) -> None:
    """Write `page` to `out`/report.html, whole or not at all."""
    write_text(page, REPORT_FILE, out)


def render(findings: Findings, *, made_at: datetime) -> str:
    """Render the page."""
    template = _templates().get_template("report.html")
    page = template.render(
        findings=findings,
        parts=_parts(findings),
        made_at=made_at.astimezone(UTC),
        end=attention.end_of(findings),
        comparison=comparison.compare(findings.days),
    )
    return _BREAK.sub(" ", _BETWEEN.sub("", page.strip())) + "\n"


def _parts(findings: Findings) -> dict[str, str]:
    """Return the titles of the report's parts by what their templates are called."""
    return {
        "attention": "Needs attention",
        "owed": "Owed, held, lost",
        "servers": "All servers",
        "changes": comparison.heading(findings),
        "errors": "Why attempts fail",
        "network": "The network, day by day",
        "outages": "Outages",
        "busiest": "The busiest servers",
        "spread": "How servers compare",
        "relays": "What relays saved",
        "keys": "Suspicious keys",
        "completeness": "How complete the data are",
        "definitions": "How each number is defined",
    }


@cache
def _templates() -> Environment:
    """Return the templates, whatever they print escaped, and what they have to write with."""
    found = Environment(
        loader=ChoiceLoader(
            [PackageLoader("federation.analytics.report"), PackageLoader("workers.dashboard", "static")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals.update(
        NAMES=attention.NAMES,
        NOTHING=wording.NOTHING,
        BAD_DAY=BAD_DAY,
        DAY=DAY,
        DAYS=DAYS,
        HELD_FOR=HELD_FOR,
        MOST_WITH_DAYS=MOST_WITH_DAYS,
        CARDS=_CARDS,
        PAGE=_PAGE,
    )
    for written in (
        *(advice.meaning, advice.own_steps, advice.owed_steps, advice.steps),
        *(attention.by_state, attention.expiry, attention.loss_codes, attention.since_told, attention.state_of),
        *(advice.own_failures, advice.own_trouble, comparison.compared, strip),
        *(network_charts.errors, network_charts.network, network_charts.owed_and_lost, network_charts.spread),
    ):
        found.globals[written.__name__] = written
    for filtering in (
        *(wording.count, wording.day, wording.day_and_year, wording.days, wording.growth, wording.milliseconds),
        *(wording.moment, wording.named, wording.percent, wording.plural, wording.points, wording.score),
        *(wording.seconds, wording.short, wording.told, wording.total, wording.with_dates, attention.state),
    ):
        found.filters[filtering.__name__] = filtering
    return found
