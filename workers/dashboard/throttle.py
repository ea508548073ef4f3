"""How quickly somebody may guess a password: a few times at once, then each try waits, and longer each time.

What is counted are failures, by account and client, and all together. A try is not refused for what others did: behind
a proxy all may come from one address, and a stranger could keep everybody out. It only waits, and never for so long
that whoever has the right password would give up.

How many wait at once is bounded, and with it how many guesses there are in a second. Where there is no room, a new try
still gets in, and one of the client that has most in the room goes; of that client's, one for the account that has
most. It is the last one: if the first one went, a stranger who is quick enough would let nobody wait to the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Try:
    """A login that waits for `wait` before it is looked at, unless it is `refused` before."""

    client: str
    account: bytes
    wait: timedelta
    refused: asyncio.Event = field(default_factory=asyncio.Event)


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
        self._keys: OrderedDict[tuple[str, bytes], _Failures] = OrderedDict()
        self._waiting: dict[Try, None] = {}  # the one that came first is first

    @property
    def waiting(self) -> int:
        """How many tries wait."""
        return len(self._waiting)

    def begin(self, name: str, client: str) -> Try:
        """Count a try as failed, and let it wait until it is `looked_at`. If too many wait, another one is refused."""
        key = client, _account(name)
        failures = self._keys.setdefault(key, _Failures(0, self._now()))
        self._keys.move_to_end(key)
        while len(self._keys) > _MOST_KEYS:
            self._keys.popitem(last=False)
        wait = max(self._counted(failures, self._each), self._counted(self._all, self._together))
        if self.waiting >= self._most_waiting:
            self._make_room()
        begun = Try(client=client, account=key[1], wait=wait)
        self._waiting[begun] = None
        return begun

    def looked_at(self, waited: Try) -> None:
        """Note that a try waits no longer. Repeating it does nothing."""
        self._waiting.pop(waited, None)

    def succeeded(self, right: Try) -> None:
        """Take back what was counted for a try before it was known to be right."""
        if (failures := self._keys.get((right.client, right.account))) is not None:
            failures.count = max(0.0, failures.count - 1)
        self._all.count = max(0.0, self._all.count - 1)

    def _make_room(self) -> None:
        clients = Counter(each.client for each in self._waiting)
        accounts = Counter((each.client, each.account) for each in self._waiting)

        def share(waiting: Try) -> tuple[int, int]:
            return clients[waiting.client], accounts[waiting.client, waiting.account]

        last = max(reversed(self._waiting), key=share)  # of equals the one that came last
        self.looked_at(last)
        last.refused.set()

    def _counted(self, failures: _Failures, pace: Waits) -> timedelta:
        """Return the wait after the failures so far, and count one more."""
        now = self._now()
        forgotten = (now - failures.at) / pace.forget.total_seconds()
        before, failures.at = max(0.0, failures.count - forgotten), now
        # No more than what makes a try wait for longest: those of an hour are forgotten in a few minutes.
        failures.count = min(before + 1, pace.free + 10)
        return pace.wait(before)


def _account(name: str) -> bytes:
    """Return what stands for a name, which may be as long as a form."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
