"""The last days compared with those before them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from federation.analytics.days import WEEK
from federation.analytics.report.findings import Day

if TYPE_CHECKING:
    from collections.abc import Sequence


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
