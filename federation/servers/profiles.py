"""Which implementation of the wire an operator says a server runs, where deliveries have to make a difference."""

from __future__ import annotations

from enum import StrEnum


class Profile(StrEnum):
    """Values of `server_links.profile`."""

    ORIGINAL = "original"
    """The first implementation: it signs no acknowledgment of a follow, and refuses a post that it has already."""


def profile_of(name: str | None) -> Profile | None:
    """The profile of that name; None for none, and for one this version does not know."""
    return Profile(name) if name in set(Profile) else None
