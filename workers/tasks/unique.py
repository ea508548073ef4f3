"""Which enqueues of a task count as one, and for how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from workers.checks import MAX_DELAY, as_positive, check_text, reworded
from workers.deduplication import DeduplicationMode
from workers.kv.base import encode_key
from workers.specs import content_id

Uniqueness: TypeAlias = "Unique | timedelta | float | bool"
"""A period alone, in which the first of several enqueues counts; True: until its job has ended; False: all count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique:
    """Of several enqueues of a task with the same arguments, one makes a job.

    `period` is how long, from when the job is due; without one it is until the job has ended. By the mode `debounce`
    the job waits until nobody has enqueued for a period, and runs with the last arguments. `keys` are the names of the
    arguments that are compared, all if there are none.

    Raises:
        ValueError, TypeError: a period that is not above zero and up to 100 years; a mode that does not fit it.
    """

    period: timedelta | float | None = None
    mode: DeduplicationMode | None = None
    keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.period is not None:
            object.__setattr__(self, "period", as_period("period", self.period))
        usual = DeduplicationMode.SIMPLE if self.period is None else DeduplicationMode.THROTTLE
        mode = usual if self.mode is None else DeduplicationMode(self.mode)
        if (mode is DeduplicationMode.SIMPLE) is not (self.period is None):
            raise ValueError("unique: a period goes with the modes throttle and debounce, and with no other")
        object.__setattr__(self, "mode", mode)
        if isinstance(self.keys, str):
            raise TypeError(f"unique: keys are names of arguments, as ({self.keys!r},)")
        object.__setattr__(self, "keys", tuple(self.keys))


def as_unique(what: str, given: Uniqueness | None) -> Unique | None:
    """Return what is meant by a period alone, or by True; None where every enqueue counts.

    Raises:
        ValueError, TypeError: it is none of these, or out of its range.
    """
    if isinstance(given, Unique):
        return given
    if given is None or isinstance(given, bool):
        return Unique() if given else None
    return Unique(period=as_period(what, given))


def as_period(what: str, given: timedelta | float) -> timedelta:
    """Return how long a key is taken.

    Raises:
        ValueError, TypeError: it is no duration above zero and up to 100 years.
    """
    period = as_positive(what, given)
    if period > MAX_DELAY:
        raise ValueError(f"{what} is up to 100 years, not {given!r}")
    return period


@dataclass(frozen=True, slots=True)
class TakenKey:
    """A deduplication key of one task alone; `ttl` counts from when the job is due, and `simple` has no use for it."""

    scope: tuple[str, str]
    mode: DeduplicationMode
    ttl: timedelta

    @property
    def text(self) -> str:
        """The key as the queue knows it."""
        return encode_key(self.scope)

    @property
    def lasting(self) -> timedelta | None:
        """How long it is taken, from when the job is due; None: as long as the job."""
        return None if self.mode is DeduplicationMode.SIMPLE else self.ttl


def scope_of(task: str, key: str) -> tuple[str, str]:
    """Return the key as one of its task alone.

    Raises:
        TypeError, ValueError: it is no text, or not of 1 to 512 bytes.
    """
    if not isinstance(key, str):
        raise TypeError(f"task {task!r}: a deduplication key is a text, not {type(key).__name__}")
    check_text("deduplication key", key)
    scope = (task, key)
    check_text("deduplication key, its task's name and escapes included,", encode_key(scope))
    return scope


def key_of_data(task: str, unique: Unique, items: Sequence[object]) -> str:
    """Return the key that the same data have, or the same of what `keys` names in them; a batch has one for all.

    Raises:
        ValueError: the data lack what is named.
        TypeError: they are not JSON's.
    """
    compared = [_compared(task, unique.keys, data) for data in items]
    try:
        return content_id(compared)
    except (TypeError, ValueError) as error:
        raise reworded(error, f"task {task!r}: what is unique is compared as JSON: {error}") from None


def _compared(task: str, keys: Sequence[str], data: object) -> object:
    if not keys:
        return data
    if not isinstance(data, Mapping) or not all(key in data for key in keys):
        raise ValueError(f"task {task!r}: it is unique by {', '.join(map(repr, keys))}, which these data lack")
    return [data[key] for key in keys]
