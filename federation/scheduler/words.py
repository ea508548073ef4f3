"""What a run of a recurring job says of itself, in words: `120 rows, 3 added`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

NOTHING: Final = "nothing to do"
_USUAL: Final = {"complete": True}
"""What of yes and no is not worth a word; of all others it is no."""
_ONE: Final = {
    "actions": "action",
    "attempts": "attempt",
    "bulk_jobs": "bulk job",
    "deliveries": "delivery",
    "health_events": "health event",
    "losses": "loss",
    "rotations": "rotation",
    "rows": "row",
    "rules": "rule",
    "servers": "server",
    "servers_to_release": "server to release",
    "suspects_released": "suspect released",
    "texts": "text",
}


def in_words(detail: Mapping[str, object]) -> str:
    """Say what a run did; what it counted and did not find is left out."""
    return ", ".join(_parts(detail)) or NOTHING


def stored_in_words(detail: str | None) -> str | None:
    """Say what a run did whose detail was stored as JSON, of which only the beginning may be left."""
    try:
        found = json.loads(detail or "")
    except ValueError:
        return detail
    return in_words(found) if isinstance(found, dict) else detail


def _parts(detail: Mapping[str, object]) -> Iterator[str]:
    for name, value in detail.items():
        words = name.replace("_", " ")
        if name == "error":
            yield str(value)
        elif isinstance(value, bool):
            if value is not _USUAL.get(name, False):
                yield words if value else f"not {words}"
        elif isinstance(value, int):
            if value:
                yield f"{value} {_ONE.get(name, words) if value == 1 else words}"
        else:
            yield f"{words} {value}"
