"""What is noted of the days that were computed."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from federation.analytics.data.computed import COMPUTED_FILE, computed_days, note_computed
from federation.analytics.frames import Window

DAYS = [date(2026, 3, day) for day in (1, 2, 3)]


def noon(day: int) -> datetime:
    return datetime(2026, 3, day, 12, tzinfo=UTC)


def test_days_are_early_until_they_are_read_after_their_end(tmp_path: Path) -> None:
    """A later run replaces the time; what was purged stays so, as no later export brings it back."""
    note_computed(tmp_path, computed_days(tmp_path).noting(Window(since=DAYS[0], until=date(2026, 3, 4)), noon(3)))
    noted = computed_days(tmp_path)
    assert (noted.early(DAYS), noted.partly_purged(DAYS)) == ((DAYS[2],), ())
    last = Window(since=DAYS[2], until=date(2026, 3, 4))
    note_computed(tmp_path, noted.noting(last, noon(4), purged=[DAYS[0]]))
    note_computed(tmp_path, computed_days(tmp_path).noting(last, noon(4)))
    noted = computed_days(tmp_path)
    assert (noted.early(DAYS), noted.partly_purged(DAYS)) == ((), (DAYS[0],))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"read_at": 3}', '{"read_at": {}, "purged": 3}'])
def test_a_file_that_is_not_ours_notes_nothing(tmp_path: Path, text: str) -> None:
    """Nor does one that names no purged days."""
    (tmp_path / COMPUTED_FILE).write_text(text)
    noted = computed_days(tmp_path)
    assert (noted.early(DAYS), noted.partly_purged(DAYS)) == ((), ())
    (tmp_path / COMPUTED_FILE).write_text('{"read_at": {"2026-03-01": "2026-03-01T12:00:00+00:00"}}')
    assert computed_days(tmp_path).early(DAYS) == (DAYS[0],)
