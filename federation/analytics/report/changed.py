"""What changed since yesterday: the numbers of the two days."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from federation.analytics.report import wording

if TYPE_CHECKING:
    from collections.abc import Iterator

    from federation.analytics.report.findings import Findings

    Row = tuple[str, str, str, str]


def heading(findings: Findings) -> str:
    since = findings.changes.since
    if since is None or since == findings.as_of - timedelta(days=1):
        return "What changed since yesterday"
    return f"What changed since {wording.day_and_year(since)}"


def compared(findings: Findings) -> Iterator[Row]:
    """Yield what each number is called, how much it was, how much it is, and the change."""
    changes = findings.changes
    yield _counts("Servers that need attention", changes.urgent_before, sum(findings.urgent.values()))
    yield _counts("Deliveries owed", changes.owed_before, findings.obligations.owed)
    if len(findings.days) < 2 or findings.days[-2].day != changes.since:
        return
    before, now = findings.days[-2:]
    yield _counts("Servers up at the end of the day", before.servers_healthy, now.servers_healthy)
    yield _counts("Attempts on the day", before.attempts, now.attempts)
    change = None
    if before.success_rate is not None and now.success_rate is not None:
        change = now.success_rate - before.success_rate
    yield (
        "Got through",
        wording.percent(before.success_rate),
        wording.percent(now.success_rate),
        wording.points(change),
    )


def _counts(name: str, before: int, now: int) -> Row:
    return name, wording.count(before), wording.count(now), wording.difference(now, before)
