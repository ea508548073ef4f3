"""How many jobs a worker asks for at once."""

from __future__ import annotations

import sys


class Appetite:
    """As many as there are slots, until an answer could not be read: then half as many, and slowly more again."""

    def __init__(self) -> None:
        self._most = sys.maxsize

    def of(self, free: int) -> int:
        """Return how many of the free slots to ask for."""
        return min(free, self._most)

    def was_lost(self, asked: int) -> None:
        """Note that the answer to a claim of so many did not arrive, as it may have been too large."""
        self._most = max(1, min(self._most, asked) // 2)

    def was_read(self, asked: int) -> None:
        """Note that the answer to a claim of so many arrived."""
        if asked >= self._most:
            self._most += 1
