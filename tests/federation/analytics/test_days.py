"""Days begin and end at midnight in UTC."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

from federation.analytics.days import end_of, midnight
from tests.federation.analytics.rows import WINDOW


def test_a_window_ends_at_midnight_or_now() -> None:
    """An outage of this morning has not lasted until tonight."""
    midnight_after = datetime(2026, 12, 1, tzinfo=UTC)
    assert end_of(WINDOW, now=midnight_after + timedelta(hours=3)) == midnight_after
    assert end_of(WINDOW, now=midnight_after - timedelta(hours=3)) == midnight_after - timedelta(hours=3)


def test_midnight_is_that_of_utc() -> None:
    """Whatever this machine's own time zone is."""
    assert midnight(date(2026, 11, 1)) == datetime(2026, 11, 1, 2, tzinfo=timezone(timedelta(hours=2)))
