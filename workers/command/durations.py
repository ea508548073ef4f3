"""Durations as people type them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

_UNITS: Final = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_LONGEST_DIGITS: Final = 9


def parse_duration(text: str) -> timedelta:
    """Return the duration that `250ms`, `30s`, `10m`, `2h` or `1d` means.

    Raises:
        ValueError: it is no such text.
    """
    found = re.fullmatch(rf"([0-9]{{1,{_LONGEST_DIGITS}}})(ms|s|m|h|d)", text)
    if found is None:
        raise ValueError(f"{text!r} is no duration, such as 30s, 10m, 2h or 1d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})
