"""Limits on the ids, names and numbers of a job, and the making of new ids."""

from __future__ import annotations

import inspect
import os
import time
from datetime import timedelta
from typing import Final

MAX_ID_BYTES: Final = 512
MIN_PRIORITY: Final = -1_000
MAX_PRIORITY: Final = 2_097_151
MAX_ATTEMPTS: Final = 1_000_000
MAX_CHAIN_INDEX: Final = 1_000_000
MAX_DEPENDENCIES: Final = 1_000
MAX_PROGRESS_BYTES: Final = 4_096
MAX_DELAY: Final = timedelta(days=36_525)
NO_TIME: Final = timedelta(0)
LONGEST_LEASE: Final = timedelta(days=1)
"""One that ends later was given by a clock that was ahead; see `Storage.recover`."""
_VARIANTS: Final = "89ab"
"""What the digit may be that says which kind of UUID it is."""


def check_text(what: str, value: str) -> None:
    """Accept any non-empty text of at most 512 bytes.

    Raises:
        ValueError: empty, too long, or not encodable as UTF-8 (a lone surrogate).
        TypeError: not text.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, not {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} cannot be encoded as UTF-8: {error.reason} at {error.start}") from None
    if not 1 <= size <= MAX_ID_BYTES:
        raise ValueError(f"{what} must be 1 to {MAX_ID_BYTES} bytes long, not {size}")


def check_whole(what: str, value: int, least: int, most: int) -> None:
    """Accept whole numbers in a range.

    `True` is no number here. 1.5 is refused because each storage would round it in its own way.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, not {value!r}")


def as_duration(what: str, value: timedelta | float) -> timedelta:
    """Return a duration that is given as a timedelta or as a number of seconds.

    Raises:
        TypeError: it is neither.
        ValueError: no timedelta is that long.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is a timedelta or a number of seconds, not {value!r}")
    try:
        return timedelta(seconds=value)
    except (OverflowError, ValueError):
        raise ValueError(f"{what} is out of range: {value!r} s") from None


def as_lease(what: str, value: timedelta | float) -> timedelta:
    """Return a duration as `as_positive`, which is at most `LONGEST_LEASE`; else `ValueError`."""
    found = as_positive(what, value)
    if found > LONGEST_LEASE:
        raise ValueError(f"{what} must be at most {LONGEST_LEASE}, not {found}: it is renewed while the job runs")
    return found


def as_positive(what: str, value: timedelta | float) -> timedelta:
    """Return a duration as `as_duration`, which is above zero; else `ValueError`."""
    found = as_duration(what, value)
    if found <= timedelta(0):
        raise ValueError(f"{what} must be above zero, not {found}")
    return found


def check_callable(what: str, value: object) -> None:
    """Accept what can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"{what} is something to call, not {value!r}")


def check_function(what: str, value: object) -> None:
    """Accept what can be called and ends with a result.

    Raises:
        TypeError: it cannot, or it is a generator, of whose body nobody would run a line.
    """
    check_callable(what, value)
    if inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        raise TypeError(f"{what} returns what it gives, and does not `yield` it as {value.__qualname__} does")


def check_progress(value: bytes) -> None:
    """Accept at most 4 KiB.

    Raises:
        ValueError: it is longer.
    """
    if len(value) > MAX_PROGRESS_BYTES:
        raise ValueError(f"progress must be at most {MAX_PROGRESS_BYTES} bytes long, not {len(value)}")


def reworded(error: TypeError | ValueError, text: str) -> TypeError | ValueError:
    """Return an error of the kind that callers tell apart, with this text; those of libraries are made of more."""
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)


def new_id() -> str:
    """Make a fresh id that sorts by creation time: 48 bits of milliseconds, 74 random bits, as a UUID (version 7)."""
    made = f"{time.time_ns() // 1_000_000:012x}"
    random = os.urandom(10)
    digits = random.hex()
    return f"{made[:8]}-{made[8:]}-7{digits[:3]}-{_VARIANTS[random[9] & 3]}{digits[3:6]}-{digits[6:18]}"
