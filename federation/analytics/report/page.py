"""The report: one HTML file that needs nothing else, no network, no scripts, and lists unhealthy servers first."""

from __future__ import annotations

from datetime import UTC
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from federation.analytics import REPORT_FILE
from federation.analytics.data.results import write_text
from federation.analytics.report import sections
from federation.analytics.report.findings import DAYS
from federation.analytics.report.markup import Markup, join, tag
from federation.analytics.report.wording import day_and_year, moment

if TYPE_CHECKING:
    from datetime import datetime

    from federation.analytics.data.snapshots import Place
    from federation.analytics.report.findings import Findings

# If a stranger's text ever got past the escaping, a browser would still run and fetch nothing.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_page(page: str, out: Place) -> None:
    """Write `page` to `out`/report.html, whole or not at all."""
    write_text(page, REPORT_FILE, out)


def render(findings: Findings, *, made_at: datetime) -> str:
    """Render the page."""
    style = _text("workers.dashboard", "static", "palette.css") + _text("federation.analytics.report", "report.css")
    title = f"Federation health as of {day_and_year(findings.as_of)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("header", tag("h1", "Federation health"), tag("p", _window(findings), class_="soft small")),
        tag("main", *sections.everything(findings)),
        tag("footer", _origin(findings, made_at)),
    )
    return join(Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), "\n")


def _window(findings: Findings) -> str:
    if not findings.days:
        return f"as of {day_and_year(findings.as_of)}, no day computed"
    return f"{day_and_year(findings.days[0].day)} to {day_and_year(findings.as_of)}, days in UTC"


def _origin(findings: Findings, made_at: datetime) -> str:
    missing = DAYS - len(findings.days)
    gap = f" {missing} of these days have not been computed and are left out." if missing else ""
    return (
        f"Made on {moment(made_at.astimezone(UTC))} UTC from the {DAYS} days up to and including"
        f" {day_and_year(findings.as_of)}.{gap}"
    )


def _text(package: str, *path: str) -> str:
    return files(package).joinpath(*path).read_text(encoding="utf-8")
