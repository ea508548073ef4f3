"""How long to wait before the next try, where something is tried for as long as it takes."""

from __future__ import annotations


class Backoff:
    """Pauses in seconds: `first`, then twice the last one, up to `longest`; from `first` again after `reset`."""

    def __init__(self, *, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def reset(self) -> None:
        """Begin with `first` again: a try succeeded."""
        self._next = self._first

    def pause(self) -> float:
        """Return how long to wait now, after one more try has failed."""
        pause, self._next = self._next, min(self._next * 2, self._longest)
        return pause
