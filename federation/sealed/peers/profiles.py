"""Which implementation of the protocol a server runs, as an operator says, where deliveries have to differ by it."""

from __future__ import annotations

from enum import StrEnum


class Profile(StrEnum):
    """Values of `server_links.profile`."""

    ORIGINAL = "original"
    """The first implementation: it does not sign acknowledgments of follows, and refuses a post that it already has."""


def profile_of(name: str | None) -> Profile | None:
    """Return the profile of that name, or None for no name, or for one that this version does not know."""
    return Profile(name) if name in set(Profile) else None
