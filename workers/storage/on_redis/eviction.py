"""Whether a storage's URL allows that its server evicts keys."""

from __future__ import annotations

from typing import Final

from workers.errors import StorageError
from workers.storage.redis_urls import take_parameter

_WORDS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def take_eviction(url: str) -> tuple[str, bool]:
    """Return the URL without its `?allow_eviction=`, and whether that allows it.

    Raises:
        StorageError: it says neither yes nor no.
    """
    target, said = take_parameter(url, "allow_eviction")
    if said is None:
        return url, False
    if said not in _WORDS:
        raise StorageError("?allow_eviction= must be true or false")
    return target, _WORDS[said]
