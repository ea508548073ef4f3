"""How often somebody may guess a password: a few times at once, then only now and then, from one address and from all.

What is counted are failures. Whoever has used theirs up is not even asked, so that a right guess tells nothing either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Final

_MOST_ADDRESSES: Final = 4_096


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many at once, and one more each `every`."""

    burst: int
    every: timedelta


class LoginThrottle:
    """Counts failed logins by address, and all together."""

    def __init__(
        self,
        *,
        per_address: Rate = Rate(burst=5, every=timedelta(seconds=30)),
        together: Rate = Rate(burst=50, every=timedelta(seconds=2)),
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._per_address = per_address
        self._together = together
        self._now = now
        self._all = _Allowance(together.burst, now())
        self._addresses: OrderedDict[str, _Allowance] = OrderedDict()

    def wait(self, address: str) -> timedelta:
        """Return how long a login from this address has to wait; nothing if it may be tried now."""
        of_address = self._addresses.get(address)
        waits = [self._missing(self._all, self._together)]
        if of_address is not None:
            waits.append(self._missing(of_address, self._per_address))
        return max(waits)

    def failed(self, address: str) -> None:
        """Count a login as failed."""
        allowance = self._addresses.setdefault(address, _Allowance(self._per_address.burst, self._now()))
        self._addresses.move_to_end(address)
        while len(self._addresses) > _MOST_ADDRESSES:
            self._addresses.popitem(last=False)
        for each in (allowance, self._all):
            each.left -= 1

    def succeeded(self, address: str) -> None:
        """Take back what was counted for a login before it was known to be right."""
        if (allowance := self._addresses.get(address)) is not None:
            allowance.left += 1
        self._all.left += 1

    def _missing(self, allowance: _Allowance, rate: Rate) -> timedelta:
        now = self._now()
        gained = (now - allowance.at) / rate.every.total_seconds()
        allowance.left, allowance.at = min(allowance.left + gained, rate.burst), now
        return timedelta(seconds=max(0.0, (1 - allowance.left) * rate.every.total_seconds()))
