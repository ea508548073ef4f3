"""Where time comes from, so that tests can move it: the wall clock is handed in, the other is the event loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol


def monotonic() -> float:
    """Seconds on the running event loop's clock, which no change of the wall clock moves.

    The loop's and not the machine's, so that whoever waits and whoever measures the wait have one idea of time.
    """
    return asyncio.get_running_loop().time()


class Clock(Protocol):
    """The wall clock of a storage that has no server to ask."""

    def now(self) -> datetime:
        """The current time, aware, in UTC."""


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
        """The clock shows `by` more, and everyone who watches it was told."""
        self._now += by
        for notice in self._watchers:
            notice()

    def watch(self, notice: Callable[[], None]) -> None:
        """`notice` is called after every `advance`: the timers of a clock that stands still."""
        self._watchers.append(notice)
