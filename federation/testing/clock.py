"""A clock that goes on as the machine's does, and that tests move ahead."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class MovableClock:
    """The time of a node under test: the machine's, and as much later as it was moved."""

    def __init__(self) -> None:
        self._ahead = timedelta()

    def now(self) -> datetime:
        """Return the current time, aware, in UTC."""
        return datetime.now(UTC) + self._ahead

    def advance(self, by: timedelta) -> None:
        """Move the clock ahead. Nothing happens by that alone: what is due then is done by `deliver` or `receive`.

        Raises:
            ValueError: that would be back.
        """
        if by < timedelta():
            raise ValueError("a clock is moved ahead, never back")
        self._ahead += by

    def advance_to(self, moment: datetime) -> None:
        """Move the clock ahead to a moment, unless that has passed."""
        self._ahead += max(moment - self.now(), timedelta())
