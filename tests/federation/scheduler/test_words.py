"""What recurring jobs say of themselves, as people read it."""

from __future__ import annotations

import json

import pytest

from federation.scheduler.words import in_words, stored_in_words


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        ({"attempts": 12, "servers": 1}, "12 attempts, 1 server"),
        ({"deliveries": 1, "attempts": 0, "follow_news": 2, "losses": 1}, "1 delivery, 2 follow news, 1 loss"),
        (
            {"rows": 120, "added": 3, "complete": True, "servers_to_release": 2},
            "120 rows, 3 added, 2 servers to release",
        ),
        ({"rows": 200, "added": 0, "complete": False}, "200 rows, not complete"),
        ({"asked": 0, "confirmed": 0, "dropped": False}, "nothing to do"),
        ({"asked": 0, "confirmed": 0, "dropped": True}, "dropped"),
        ({"as_of": "2026-11-26", "ran": False}, "as of 2026-11-26"),
        ({"error": "its process was stopped"}, "its process was stopped"),
        ({}, "nothing to do"),
    ],
)
def test_a_run_is_told_in_words(detail: dict[str, object], told: str) -> None:
    """With one thing in the singular, and without what was looked for and not found."""
    assert in_words(detail) == told
    assert stored_in_words(json.dumps(detail)) == told


@pytest.mark.parametrize("stored", [None, '{"error": "of which the end was cut', "[1]", "in words"])
def test_what_cannot_be_read_is_shown_as_it_is(stored: str | None) -> None:
    """Of a long detail only the beginning is stored."""
    assert stored_in_words(stored) == stored
