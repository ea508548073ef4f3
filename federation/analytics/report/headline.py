"""What this node itself got wrong, which no list of servers would show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from federation.analytics.report import wording
from federation.analytics.report.advice import meaning

if TYPE_CHECKING:
    from federation.analytics.report.findings import Findings

_OWN_SHARE: Final = 0.01
"""Of all failures: fewer of its own are no alert."""


def own_trouble(findings: Findings) -> list[str]:
    """Return when most servers failed together, or this node did nothing."""
    return [f"{wording.day(each.day)} {hours}" for each in findings.days for hours in each.own_trouble]


def own_failures(findings: Findings) -> dict[str, int]:
    """Return the codes of attempts that this node itself failed, and how many; none if they are few among all."""
    ours = {code: number for code, number in findings.error_totals.items() if meaning(code).ours}
    many = sum(ours.values()) >= _OWN_SHARE * max(sum(findings.error_totals.values()), 1)
    return ours if many else {}
