"""Sources of time that tests can move: a wall clock that is passed in, and the event loop's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol


def monotonic() -> float:
    """Return the seconds on the running event loop's clock, which no change of the wall clock moves.

    It is the loop's clock and not the machine's, so that code that waits and code that measures the wait agree.
    """
    return asyncio.get_running_loop().time()


class Clock(Protocol):
    """The wall clock of a storage that has no server to ask."""

    def now(self) -> datetime:
        """Return the current time, aware, in UTC."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """A clock that stands still until a test advances it."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._watchers: list[Callable[[], None]] = []

    def now(self) -> datetime:
        return self._now

    def advance(self, by: timedelta) -> None:
        """Move the clock forward by `by` and call everyone who watches it."""
        self._now += by
        for notice in self._watchers:
            notice()

    def watch(self, notice: Callable[[], None]) -> None:
        """Call `notice` after every `advance`: the timers of a clock that stands still."""
        self._watchers.append(notice)
