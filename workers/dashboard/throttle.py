"""How quickly somebody may guess a password: a few times at once, then each try waits, and longer each time.

What is counted are failures, by account and client, and all together. A try is never refused for what others did:
behind a proxy all may come from one address, and a stranger could keep everybody out. It only waits, and never for so
long that whoever has the right password would give up. How many wait at once is bounded, and with it how many guesses
there are in a second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Final

_MOST_KEYS: Final = 4_096


@dataclass(slots=True)
class _Failures:
    count: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """So many failures cost nothing, each further one doubles the `first` wait; one is forgotten each `forget`."""

    free: int
    forget: timedelta
    first: timedelta = timedelta(milliseconds=500)
    longest: timedelta = timedelta(seconds=15)

    def wait(self, failures: float) -> timedelta:
        """Return how long a try waits after these failures."""
        doubled = min(failures - self.free, 10.0)
        return timedelta() if doubled < 0 else min(self.first * 2**doubled, self.longest)


class LoginThrottle:
    """Counts failed logins by account and client, and all together."""

    def __init__(
        self,
        *,
        each: Waits = Waits(free=5, forget=timedelta(seconds=30)),
        together: Waits = Waits(free=50, forget=timedelta(seconds=2)),
        most_waiting: int = 64,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._each = each
        self._together = together
        self._most_waiting = most_waiting
        self._now = now
        self._all = _Failures(0, now())
        self._keys: OrderedDict[tuple[str, str], _Failures] = OrderedDict()
        self._waiting = 0

    def begin(self, name: str, client: str) -> timedelta | None:
        """Count a try as failed, and return how long it waits before it is looked at; None if too many wait already."""
        if self._waiting >= self._most_waiting:
            return None
        failures = self._keys.setdefault((name, client), _Failures(0, self._now()))
        self._keys.move_to_end((name, client))
        while len(self._keys) > _MOST_KEYS:
            self._keys.popitem(last=False)
        wait = max(self._counted(failures, self._each), self._counted(self._all, self._together))
        self._waiting += 1
        return wait

    def looked_at(self) -> None:
        """Note that a try waits no longer."""
        self._waiting -= 1

    def succeeded(self, name: str, client: str) -> None:
        """Take back what was counted for a try before it was known to be right."""
        if (failures := self._keys.get((name, client))) is not None:
            failures.count = max(0.0, failures.count - 1)
        self._all.count = max(0.0, self._all.count - 1)

    def _counted(self, failures: _Failures, pace: Waits) -> timedelta:
        """Return the wait after the failures so far, and count one more."""
        now = self._now()
        forgotten = (now - failures.at) / pace.forget.total_seconds()
        before, failures.at = max(0.0, failures.count - forgotten), now
        # No more than what makes a try wait for longest: those of an hour are forgotten in a few minutes.
        failures.count = min(before + 1, pace.free + 10)
        return pace.wait(before)
