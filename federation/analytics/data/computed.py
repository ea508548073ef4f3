"""Which days were computed, and when what they were computed from was read: `OUT/computed.json`, for the nightly run.

    {"read_at": {"2026-11-21": "2026-11-22T00:20:04+00:00"}, "purged": ["2026-10-22"]}

A day that was read before it was over is not computed for good. Results that a later run replaces keep the later time.
`purged` are days of which the database lacked attempts that an earlier export has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from federation.analytics.data.directories import write_file

if TYPE_CHECKING:
    from federation.analytics.data.snapshots import Place
    from federation.analytics.frames import Window

COMPUTED_FILE: Final = "computed.json"
DAYS_KEPT: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What is noted of the days."""

    read_at: Mapping[str, str]
    purged: frozenset[str]

    def early(self, days: Iterable[date]) -> tuple[date, ...]:
        """Return those of `days` that were read before they were over."""
        return tuple(day for day in days if self.read_at.get(day.isoformat(), "9999")[:10] <= day.isoformat())

    def partly_purged(self, days: Iterable[date]) -> tuple[date, ...]:
        return tuple(day for day in days if day.isoformat() in self.purged)

    def noting(self, window: Window, read_at: datetime, *, purged: Iterable[date] = ()) -> Computed:
        """Return this with the days of `window` as computed from what was read from `read_at` on."""
        moments = {**self.read_at, **{day.isoformat(): read_at.isoformat() for day in window.days}}
        lacking = sorted(self.purged | {day.isoformat() for day in purged})
        latest = dict(sorted(moments.items())[-DAYS_KEPT:])
        return Computed(read_at=latest, purged=frozenset(lacking[-DAYS_KEPT:]))


def note_computed(out: Path, computed: Computed) -> None:
    """Write down in `out` what is computed."""
    noted = {"read_at": dict(computed.read_at), "purged": sorted(computed.purged)}
    write_file(json.dumps(noted, indent=2) + "\n", out / COMPUTED_FILE)


def computed_days(out: Place) -> Computed:
    """Return what is noted; a file that is not there, or not ours, notes nothing, and neither does a store."""
    if not isinstance(out, Path):
        return Computed(read_at={}, purged=frozenset())
    try:
        noted = json.loads((out / COMPUTED_FILE).read_text(encoding="utf-8"))
        return Computed(read_at=dict(noted["read_at"]), purged=frozenset(noted.get("purged", ())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Computed(read_at={}, purged=frozenset())
