"""The policy that says when a failed attempt is tried again, and the pauses of what is tried until it works."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, TypeAlias

from workers.checks import MAX_DELAY, as_duration

BackoffFunction: TypeAlias = Callable[[int, BaseException], timedelta | float]
"""Says how long to wait after attempt number *n* (the first is 1) has failed with this error; a number is seconds."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with a cap: `min(initial * multiplier ** (n - 1), maximum)` after attempt *n*.

    The defaults wait 10, 20, 40, 80, 160, 300, 300 ... seconds. `jitter` spreads each delay evenly over ± that share
    of it (default 10 %; 0 gives the exact values). `multiplier=1` is a fixed delay. Numbers are seconds.

    A function `backoff` of the attempt and its error replaces all of that; `jitter` does not change its delay. Where it
    raises, or returns anything but a delay from 0 to 100 years, this is logged with its name, and the rest counts. It
    belongs to a worker: the policy that a job brings along is stored, and has none.
    """

    initial: timedelta = timedelta(seconds=10)
    multiplier: float = 2.0
    maximum: timedelta = timedelta(seconds=300)
    jitter: float = 0.1
    backoff: BackoffFunction | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", as_duration("initial", self.initial))
        object.__setattr__(self, "maximum", as_duration("maximum", self.maximum))
        if self.initial < timedelta(0) or self.maximum < timedelta(0):
            raise ValueError(f"retry delays must not be negative: initial={self.initial}, maximum={self.maximum}")
        if self.multiplier < 1:
            raise ValueError(f"multiplier must be at least 1, not {self.multiplier}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is a share from 0 to 1, not {self.jitter}")
        if self.backoff is not None and (not callable(self.backoff) or inspect.iscoroutinefunction(self.backoff)):
            raise TypeError(f"backoff is a plain function of the attempt and its error, not {self.backoff!r}")

    def delay(
        self,
        attempt: int,
        error: BaseException | None = None,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> timedelta:
        """Return how long to wait after attempt number `attempt` (the first is 1) has failed with this error."""
        if self.backoff is not None and error is not None:
            chosen = _delay_of(self.backoff, attempt, error)
            if chosen is not None:
                return chosen
        try:
            seconds = self.initial.total_seconds() * self.multiplier ** (attempt - 1)
        except OverflowError:
            seconds = float("inf")
        seconds = min(seconds, self.maximum.total_seconds())
        if self.jitter:
            seconds *= uniform(1 - self.jitter, 1 + self.jitter)
        return timedelta(seconds=seconds)


def _delay_of(backoff: BackoffFunction, attempt: int, error: BaseException) -> timedelta | None:
    """Return the function's delay; None, told by its name, if it has none: the attempt must end all the same."""
    name = getattr(backoff, "__qualname__", repr(backoff))
    try:
        delay = as_duration("what it returns", backoff(attempt, error))
    except BaseException as raised:  # also SystemExit, as of a handler: it would end the worker, and not the attempt
        _LOG.warning("the back-off %s failed with %s: %s; the policy decides", name, type(raised).__name__, raised)
        return None
    if not timedelta(0) <= delay <= MAX_DELAY:
        _LOG.warning("the back-off %s returned %s, not a delay from 0 to 100 years; the policy decides", name, delay)
        return None
    return delay


def with_backoff(policy: RetryPolicy | None, backoff: BackoffFunction | None) -> RetryPolicy | None:
    """Return the policy with this function, or as it is without one.

    Raises:
        TypeError: it is no function, or the policy is none.
    """
    if backoff is None:
        return policy
    check_policy("retry", policy)
    return replace(policy or RetryPolicy(), backoff=backoff)


def stored_policy(policy: RetryPolicy | None) -> RetryPolicy | None:
    """Return the policy that a job brings along.

    Raises:
        ValueError: it has a function, which is stored nowhere.
    """
    if policy is not None and policy.backoff is not None:
        raise ValueError("a job's own back-off is stored with it, and has no function; give that to the task or worker")
    return policy


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
    """A back-off of which a job knows the name alone: a custom one of Node's producers: see `WorkerOptions`."""

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
