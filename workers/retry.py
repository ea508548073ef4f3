"""The policy that says when a failed attempt is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with a cap: `min(initial * multiplier ** (n - 1), maximum)` after attempt *n*.

    The defaults wait 10, 20, 40, 80, 160, 300, 300 ... seconds. `jitter` spreads each delay evenly over ± that share
    of it (default 10 %; 0 gives the exact values). `multiplier=1` is a fixed delay.
    """

    initial: timedelta = timedelta(seconds=10)
    multiplier: float = 2.0
    maximum: timedelta = timedelta(seconds=300)
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if self.initial < timedelta(0) or self.maximum < timedelta(0):
            raise ValueError(f"retry delays must not be negative: initial={self.initial}, maximum={self.maximum}")
        if self.multiplier < 1:
            raise ValueError(f"multiplier must be at least 1, not {self.multiplier}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is a share from 0 to 1, not {self.jitter}")

    def delay(self, attempt: int, *, uniform: Callable[[float, float], float] = random.uniform) -> timedelta:
        """Return how long to wait after attempt number `attempt` (the first is 1) has failed."""
        try:
            seconds = self.initial.total_seconds() * self.multiplier ** (attempt - 1)
        except OverflowError:
            seconds = float("inf")
        seconds = min(seconds, self.maximum.total_seconds())
        if self.jitter:
            seconds *= uniform(1 - self.jitter, 1 + self.jitter)
        return timedelta(seconds=seconds)


AT_ONCE: Final = RetryPolicy(initial=timedelta(0), multiplier=1, jitter=0)
"""What a job of Node's without a back-off means: a failed attempt is repeated without a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBackoff:
    """A back-off of which a job knows the name alone: a custom one of Node's producers; see `Worker(backoffs=...)`."""

    type: str
    delay: timedelta = timedelta(0)


BackoffStrategy: TypeAlias = Callable[[int, timedelta], timedelta]
"""Says how long to wait after attempt number *n* (the first is 1) has failed; the second is the job's own `delay`."""
