"""Ordering keys of which many share one lock: those of one thing, each with a line of its own at every place.

Theory of operation. A transaction locks the keys that it adds deliveries of, and PostgreSQL keeps each lock in a table
of some thousands. One thing that is told to twenty thousand places takes one lock, because what is locked is the part
of a key that all its lines share. A key without places is locked whole.
"""

from __future__ import annotations

from typing import Final

_AT: Final = " at place "


def at_place(key: str, place: str) -> str:
    """Return the key of the line that `key` has at one place."""
    return key + _AT + place


def locked_part(ordering_key: str) -> str:
    """Return what is locked for a key: as much of it as all its lines share."""
    return ordering_key.partition(_AT)[0]
