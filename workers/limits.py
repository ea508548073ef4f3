"""Limits, and the keys that keep jobs back: until others have ended, time has passed, or others were served.

A job has one holding key at most: its ordering key, the key of a limit, or a fair key. Storages keep it as one text, in
the field of the ordering key. The marks in front of the others are what no ordering key may begin with. A version that
knows no limits takes any of them for an ordering key, and runs one of its jobs at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from workers.checks import check_text, check_whole

WHOLE_QUEUE: Final = "*"
"""The name of the limit on all jobs of a queue together."""

RESERVED: Final = "\x1e"
"""What every holding key but an ordering key begins with."""
LIMIT_MARK: Final = RESERVED + "L"
FAIR_MARK: Final = RESERVED + "F"
QUEUE_KEY: Final = RESERVED + "Q"
"""What holds back all jobs of a queue, by the limit `WHOLE_QUEUE`."""
SEPARATOR: Final = "\x1f"
"""What is between the name of a limit and its key."""

MOST_STARTS: Final = 1_000_000
MOST_AT_ONCE: Final = 1_000_000
MOST_VERSIONS: Final = 2**31 - 1

_UNITS: Final = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_RATE: Final = re.compile(r"([0-9]{1,9})/([0-9]{0,5})(ms|s|m|h|d)")
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Limit:
    """How many jobs may start in a time, and how many may run at once, of all those that it holds.

    `rate` is `10/s`, `100/m` or `1/30s`. It is kept by a bucket of tokens: each start takes one, also that of a retry
    or after a snooze, and none is given back. The bucket fills at the rate, up to `burst` tokens (default: the count of
    the rate), so that many jobs may start at once after a pause. `concurrency` is the number that run at the same time.

    Where processes declare one limit differently, that with the highest `version` counts; of equal ones the last.

    Raises:
        ValueError: no rate of whole numbers above zero, at most 1 000 000 in one second; a burst or a concurrency
            outside 1 ... 1 000 000; a burst without a rate; a version outside 0 ... 2 147 483 647.
    """

    rate: str | None = None
    concurrency: int | None = None
    burst: int | None = None
    version: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None:
            read_rate(self.rate)
        elif self.burst is not None:
            raise ValueError("a burst needs a rate beside it")
        if self.burst is not None:
            check_whole("the burst of a limit", self.burst, 1, MOST_STARTS)
        if self.concurrency is not None:
            check_whole("the concurrency of a limit", self.concurrency, 1, MOST_AT_ONCE)
        check_whole("the version of a limit", self.version, 0, MOST_VERSIONS)

    @property
    def interval(self) -> timedelta | None:
        """In how much time the bucket gets one token, rounded up; None without a rate."""
        if self.rate is None:
            return None
        count, per = read_rate(self.rate)
        return -(-(per // _MICROSECOND) // count) * _MICROSECOND

    @property
    def capacity(self) -> int:
        """How many tokens the bucket holds; 0 without a rate."""
        if self.rate is None:
            return 0
        return self.burst or read_rate(self.rate)[0]

    def known(self, full_at: datetime | None, now: datetime) -> datetime | None:
        """Return when the bucket is full, `full_at` or earlier; None if it is.

        An empty bucket takes no longer than this. If it seems to, the clock was set back: then the bucket counts as
        empty, and this is to be stored, so that it fills from now on.
        """
        if self.interval is None or full_at is None or full_at <= now:
            return None
        return min(full_at, now + self.capacity * self.interval)

    def opens_at(self, full_at: datetime | None, now: datetime) -> datetime | None:
        """Return when the bucket has a token, None if it has one now; `full_at` is as `known` returns it."""
        if self.interval is None or full_at is None:
            return None
        opens = full_at - (self.capacity - 1) * self.interval
        return opens if opens > now else None

    def taken(self, full_at: datetime | None, now: datetime) -> datetime | None:
        """Return when the bucket is full again after a token was taken from it; None without a rate."""
        return None if self.interval is None else max(full_at or now, now) + self.interval


class LimitKey(NamedTuple):
    """One key of a limit: each has a bucket and a count of its own. Without a key, all jobs of the limit share one."""

    limit: str
    key: str = ""

    @property
    def holding_key(self) -> str:
        """The holding key of its jobs."""
        return f"{LIMIT_MARK}{self.limit}{SEPARATOR}{self.key}"


class HeldBack(NamedTuple):
    """The limit that keeps a queued job back, and until when; None: until another job of its key ends."""

    limit: str
    key: str
    until: datetime | None

    def __str__(self) -> str:
        of = f" of key {self.key!r}" if self.key else ""
        until = "another one ends" if self.until is None else self.until.isoformat(timespec="seconds")
        return f"for limit {self.limit!r}{of}, until {until}"


def read_rate(rate: str) -> tuple[int, timedelta]:
    """Return how many jobs may start in which time.

    Raises:
        ValueError: it is no such text, or more than 1 000 000 in a second.
        TypeError: it is no text.
    """
    if not isinstance(rate, str):
        raise TypeError(f"a rate is a text such as '10/s', not {rate!r}")
    found = _RATE.fullmatch(rate)
    count = int(found[1]) if found else 0
    per = timedelta(**{_UNITS[found[3]]: int(found[2] or 1)}) if found else timedelta(0)
    if not count or not per:
        raise ValueError(f"a rate is a text such as '10/s', '100/m' or '1/30s', with numbers above zero, not {rate!r}")
    if count > MOST_STARTS or per < count * _MICROSECOND:
        raise ValueError(f"a rate is at most 1 000 000, and as many in a second, not {rate!r}")
    return count, per


def check_limit_name(name: str) -> None:
    """Accept the names of jobs, less those that would blur a holding key.

    Raises:
        ValueError: it is not 1 to 512 bytes, or has a separator in it.
    """
    check_text("name of a limit", name)
    if RESERVED in name or SEPARATOR in name:
        raise ValueError(f"the name of a limit has no control characters, not {name!r}")


def check_limits(limits: Mapping[str, Limit]) -> None:
    """Accept limits by name.

    Raises:
        ValueError: a name that no limit can have.
        TypeError: something else than a `Limit`.
    """
    for name, limit in limits.items():
        check_limit_name(name)
        if not isinstance(limit, Limit):
            raise TypeError(f"limit {name!r} is a Limit, such as Limit('10/s'), not {limit!r}")


def limit_key_of(key: str | None) -> LimitKey | None:
    """Return the key of a limit that the holding key stands for; None for any other."""
    if key == QUEUE_KEY:
        return LimitKey(WHOLE_QUEUE)
    if key is None or not key.startswith(LIMIT_MARK):
        return None
    limit, _, own = key[len(LIMIT_MARK) :].partition(SEPARATOR)
    return LimitKey(limit, own)


def fair_key_of(key: str | None) -> str | None:
    """Return the fair key that the holding key stands for; None for any other."""
    return key[len(FAIR_MARK) :] if key is not None and key.startswith(FAIR_MARK) else None


def ordering_key_of(key: str | None) -> str | None:
    """Return the ordering key that the holding key is; None for any other."""
    return None if key is None or key.startswith(RESERVED) else key
