"""What the report rests on: which days are missing or not whole, and what was set aside."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from federation.analytics.report import wording
from federation.analytics.report.findings import DAYS
from federation.analytics.report.markup import Column, Markup, join, short, table, tag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import date

    from federation.analytics.report.findings import Findings, SetAside


def completeness(findings: Findings) -> Markup:
    """Return what is missing of the days, and the rows that were set aside, with the reasons."""
    return join(tag("ul", *(tag("li", *line) for line in _lines(findings)), class_="facts"), _set_aside(findings))


def _lines(findings: Findings) -> Iterator[tuple[Markup | str, ...]]:
    found = findings.completeness
    computed = DAYS - len(found.missing)
    if found.missing:
        yield (
            f"{computed} of {DAYS} days are computed. Missing: {wording.days(found.missing)}. They are computed by ",
            tag("code", f"federation analytics run --since {found.missing[0]} --until {_after(findings)} --out OUT"),
            ", as far as the database has their attempts.",
        )
    else:
        yield (f"All of the {DAYS} days are computed.",)
    if found.early:
        yield (f"Read before they were over, so late attempts lack: {wording.days(found.early)}.",)
    if found.purged:
        told = "The database has purged attempts of these days; those that were exported before are counted"
        yield (f"{told}: {wording.days(found.purged)}.",)
    if found.read:
        parts = {"counted": found.attempts, "parked, so not tried": found.parked, "set aside": found.set_aside}
        share = wording.percent(found.set_aside / found.read)
        yield (f"{wording.count(found.read)} attempts were read = {wording.total(parts)} ({share}).",)


def _after(findings: Findings) -> date:
    return findings.completeness.missing[-1] + timedelta(days=1)


def _set_aside(findings: Findings) -> Markup:
    if not findings.quarantine:
        return tag("p", "Every row that was read was good.", class_="intro")
    columns: list[Column[SetAside]] = [
        Column("Input", lambda each: short(each.source, 60)),
        Column("Reason", lambda each: short(each.reason, 120)),
        Column("Rows", lambda each: wording.count(each.rows), number=True),
    ]
    rows = wording.plural(findings.quarantined, "row")
    attempts = wording.count(findings.completeness.set_aside)
    total = (
        f"{rows} of all inputs set aside, {attempts} of them attempts: of these days, or of none. They count in no"
        " other number, and lie in quarantine/."
    )
    shown = table(None, columns, findings.quarantine, name="Rows set aside")
    return join(tag("p", total, class_="intro"), shown)
