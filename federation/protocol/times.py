"""Moments on the wire: written as JavaScript writes them, read more generously."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

_MAX_CHARACTERS = 64
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""The time that peers write for no time at all, such as null."""


def format_moment(moment: datetime) -> str:
    """Format *moment* as ISO-8601 UTC with milliseconds and `Z`; a naive one is UTC, as in the tables."""
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return f"{aware.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def parse_moment(value: object) -> datetime:
    """Return the moment that *value* stands for, in UTC.

    Accepts what peers' `new Date(value)` accepts and senders plausibly write: ISO-8601 text (UTC if without offset),
    e-mail style dates, numbers of milliseconds since 1970, and null, which is 1970.

    Raises:
        ValueError: anything else, or a moment outside the years 1 to 9999.
    """
    if value is None:
        return EPOCH
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return EPOCH + timedelta(milliseconds=value)
        except (OverflowError, ValueError):
            raise ValueError("a number of milliseconds outside the years 1 to 9999") from None
    raise ValueError("expected a date as text or a number of milliseconds")


def _parse_text(text: str) -> datetime:
    if len(text) > _MAX_CHARACTERS:
        raise ValueError("too long for a date")
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = parse(text)
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            continue
    raise ValueError("not a date")
