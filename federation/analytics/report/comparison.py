"""The last days compared with those before them, and the last results with those before."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from federation.analytics.days import DAY, WEEK
from federation.analytics.report import wording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from federation.analytics.report.findings import Day, Findings

    Row = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some days in a row, added up."""

    days: int
    attempts: int
    delivered: int
    p95_ms: float | None

    @property
    def success_rate(self) -> float | None:
        return self.delivered / self.attempts if self.attempts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The last week, or half of the days there are, and as many days before; `before` is None if there are none."""

    now: Stretch
    before: Stretch | None

    @property
    def change(self) -> float | None:
        """The change of the success rate."""
        if self.before is None or self.now.success_rate is None or self.before.success_rate is None:
            return None
        return self.now.success_rate - self.before.success_rate


def compare(days: Sequence[Day]) -> Comparison:
    """Compare the last days with those before. The oldest comes first in `days`.

    Percentiles cannot be added up, so a stretch has the median of its days' p95.
    """
    length = min(WEEK, len(days) // 2)
    if length == 0:
        return Comparison(now=_stretch(days), before=None)
    return Comparison(now=_stretch(days[-length:]), before=_stretch(days[-2 * length : -length]))


def _stretch(days: Sequence[Day]) -> Stretch:
    latencies = [day.p95_ms for day in days if day.p95_ms is not None]
    return Stretch(
        days=len(days),
        attempts=sum(day.attempts for day in days),
        delivered=sum(day.delivered for day in days),
        p95_ms=median(latencies) if latencies else None,
    )


def heading(findings: Findings) -> str:
    since = findings.changes.since
    if since is None or since == findings.as_of - DAY:
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
