"""Which days were computed, and when what they were computed from was read: `OUT/computed.json`, for the nightly run.

    {"read_at": {"2026-11-21": "2026-11-22T00:20:04+00:00"}}

A day that was read before it was over is not computed for good. Results that a later run replaces keep the later time.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from federation.analytics.data.directories import write_file

if TYPE_CHECKING:
    from federation.analytics.frames import Window

COMPUTED_FILE: Final = "computed.json"
DAYS_KEPT: Final = 400


def note_computed(out: Path, window: Window, read_at: datetime) -> None:
    """Note that the days of `window` are computed from what was read from `read_at` on."""
    moments = {**_noted(out / COMPUTED_FILE), **{day.isoformat(): read_at.isoformat() for day in window.days}}
    latest = dict(sorted(moments.items())[-DAYS_KEPT:])
    write_file(json.dumps({"read_at": latest}, indent=2) + "\n", out / COMPUTED_FILE)


def _noted(file: Path) -> dict[str, str]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["read_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
