"""The policy that says when a failed attempt is tried again, and the pauses of what is tried until it works."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias

from workers.checks import as_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with a cap: `min(initial * multiplier ** (n - 1), maximum)` after attempt *n*.

    The defaults wait 10, 20, 40, 80, 160, 300, 300 ... seconds. `jitter` spreads each delay evenly over ± that share
    of it (default 10 %; 0 gives the exact values). `multiplier=1` is a fixed delay. Numbers are seconds.
    """

    initial: timedelta = timedelta(seconds=10)
    multiplier: float = 2.0
    maximum: timedelta = timedelta(seconds=300)
    jitter: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", as_duration("initial", self.initial))
        object.__setattr__(self, "maximum", as_duration("maximum", self.maximum))
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


def check_policy(what: str, value: RetryPolicy | None) -> None:
    """Accept a policy, or None.

    Raises:
        TypeError: it is something else, such as a number of attempts.
    """
    if value is not None and not isinstance(value, RetryPolicy):
        raise TypeError(f"{what} is a RetryPolicy, not {value!r}; how often a job is tried is its max_attempts")


AT_ONCE: Final = RetryPolicy(initial=timedelta(0), multiplier=1, jitter=0)
"""What a job of Node's without a back-off means: a failed attempt is repeated without a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBackoff:
    """A back-off of which a job knows the name alone: a custom one of Node's producers; see `Worker(backoffs=...)`."""

    type: str
    delay: timedelta = timedelta(0)


BackoffStrategy: TypeAlias = Callable[[int, timedelta], timedelta]
"""Says how long to wait after attempt number *n* (the first is 1) has failed; the second is the job's own `delay`."""


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
