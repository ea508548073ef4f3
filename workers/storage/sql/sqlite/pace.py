"""When a watcher looks next at a file that other processes write to."""

from __future__ import annotations

import math
from datetime import timedelta
from enum import Enum, auto
from typing import Final

POLL: Final = timedelta(milliseconds=50)
"""How long after a look the next one follows where nothing is heard of writes."""

REST: Final = timedelta(seconds=1)
"""And where they are heard of, when there was none."""

LINGER: Final = timedelta(seconds=1)
"""For how long after a write the looks stay as close as without it, before the rest."""

SOON_SECONDS: Final = 0.0001
"""After a look that heard the first write after a pause, and saw nothing: the commit is about to become visible."""

PAUSE_SECONDS: Final = 0.002
"""Longer than between the looks at a transaction that writes all the time, so that only its first is followed soon."""

CLOSEST_SECONDS: Final = 0.001
CLOSEST_WHILE_WE_WRITE_SECONDS: Final = 0.004


class Sight(Enum):
    """What a look has seen."""

    NOTHING = auto()
    """Nobody has committed anything."""
    OURS = auto()
    """Only this process has, and those who wait here were told by the step itself."""
    UNSURE = auto()
    """Somebody has, and whether anybody else has can be told in a moment."""
    OTHERS = auto()
    """Others have, and those who wait here were told to look."""
    NEWS = auto()
    """Others have, and somebody here had asked for it."""


class LookPace:
    """When to look next; all times are seconds, of the monotonic clock.

    Theory of operation. The first write after a pause causes a look at once. SQLite writes to its log before it makes
    the commit visible, through shared memory, of which nobody is told; in between it may synchronise the disk, or wait
    for a processor. So further looks follow the one that heard a write, at twice the distance each time up to 50 ms,
    until a second has gone by. After a pause the first of them follows after 0.1 ms. Otherwise a look never comes
    sooner than `closest` after the last one. That is 1 ms, and doubles with each look that woke somebody in vain, so
    that a busy writer of another queue in the file costs a waiter no more than 20 looks a second. It also doubles, up
    to 4 ms, with each look that found our own commits.
    """

    def __init__(self) -> None:
        self._looked = -math.inf
        self._stirred = -math.inf  # when there was last something to see or hear
        self._closest = CLOSEST_SECONDS
        self._gap = CLOSEST_SECONDS

    def left(self, now: float) -> float:
        """Return how long until the next look."""
        return self._looked + self._gap - now

    def closed(self, now: float) -> float:
        """Return for how long no write can cause a look."""
        return self._looked + self._closest - now

    @property
    def rests(self) -> bool:
        """Whether nothing has happened for a while."""
        return self._gap > POLL.total_seconds()

    def hear(self) -> None:
        """Look as soon as possible."""
        self._gap = min(self._gap, self._closest)

    def find(self) -> None:
        """Take the last look for one that was worth it."""
        self._closest = CLOSEST_SECONDS

    def poll(self, now: float) -> None:
        """Note a look where no writes are heard."""
        self._looked, self._closest, self._gap = now, CLOSEST_SECONDS, POLL.total_seconds()

    def looked(self, now: float, seen: Sight, *, heard: bool, rest: timedelta) -> None:
        """Note a look, whether a write had been heard before it, and how long to rest when nothing happens any more."""
        poll = POLL.total_seconds()
        if seen is Sight.OTHERS:
            self._closest = min(2 * self._closest, poll)
        elif seen is Sight.OURS:
            self._closest = max(self._closest, min(2 * self._closest, CLOSEST_WHILE_WE_WRITE_SECONDS))
        elif seen is Sight.NEWS:
            self._closest = CLOSEST_SECONDS
        elif seen is Sight.NOTHING:
            self._closest = max(self._closest / 2, CLOSEST_SECONDS)
        again = 2 * self._gap
        if heard or seen is not Sight.NOTHING:
            is_first = now - self._stirred > PAUSE_SECONDS and self._closest == CLOSEST_SECONDS
            again = SOON_SECONDS if seen is Sight.NOTHING and is_first else self._closest
            self._stirred = now
        lingers = now - self._stirred < LINGER.total_seconds()
        self._gap = again if again <= poll else poll if lingers else rest.total_seconds()
        self._looked = now
