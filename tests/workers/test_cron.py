"""Cron patterns and time zones that are refused; `tests/interop` compares patterns with Node."""

from __future__ import annotations

from datetime import UTC

import pytest

from workers.cron import UnreadablePattern, find_zone, read_pattern

REFUSED = (
    ("* * * * * * *", "too many fields"),
    ("H * * * *", "a random value"),
    ("* * * * 1-7/4", "the versions differ about Sunday"),
    ("* * 13 * 5#2", "the versions differ about both days"),
    ("* * 1-31 * 5", "the versions differ about `1-31`"),
    ("* * 5 * 0-6", "like it"),
    ("* * 30 feb *", "no such day"),
    ("@reboot", "no time"),
    ("@weekdays", "a macro of one version"),
    ("61 * * * *", "out of range"),
    ("5-2 * * * *", "backwards"),
    ("*/0 * * * *", "no step"),
    ("* * * * monday", "no name"),
    ("\u0665 * * * *", "a digit, but none of ASCII"),
    (",".join(["1"] * 600) + " * * * *", "too long"),
    ("FREQ=DAILY;BYHOUR=9", "for a strategy of the program's own"),
)


@pytest.mark.parametrize(("pattern", "_why"), REFUSED, ids=[why for _, why in REFUSED])
def test_a_pattern_is_refused(pattern: str, _why: str) -> None:
    """What Node's versions read differently, or not at all, is no pattern here."""
    with pytest.raises(UnreadablePattern):
        read_pattern(pattern)


def test_what_never_comes_is_found_out() -> None:
    """The search for a day that does not exist ends, and a time beyond the calendar is refused."""
    never = read_pattern("0 0 31 4,6 *")
    assert never.next_after(0, UTC) is None
    with pytest.raises(UnreadablePattern):
        never.next_after(10**18, UTC)


@pytest.mark.parametrize("name", ["Mars/Olympus", "../../etc/passwd", "right/UTC", "posix/UTC", "/etc", 5, "Europe"])
def test_a_time_zone_is_refused(name: object) -> None:
    """Only what Node takes for a time zone is one."""
    with pytest.raises(UnreadablePattern):
        find_zone(name)


def test_without_a_time_zone_it_is_the_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Node: what `TZ` names."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    assert read_pattern("0 9 * * *").next_after(0, find_zone(None)) == 3.5 * 3_600_000
