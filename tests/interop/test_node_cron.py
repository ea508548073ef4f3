"""Cron patterns, read by us and by the `cron-parser` of each of Node's versions."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC
from zoneinfo import ZoneInfo

import pytest

from tests.interop.cron_patterns import Patterns
from tests.interop.peer import install_npm_packages, scheduler_peer
from workers.storage.bullmq.cron import UnreadablePattern, find_zone, read_pattern

CASES = 1_000
OCCURRENCES = 1

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


def ours(pattern: str, zone: str, at: int) -> list[int] | None:
    """What follows, as `occurrences` in Node tells it."""
    try:
        read = read_pattern(pattern)
    except UnreadablePattern:
        return None
    found: list[int] = []
    while len(found) < OCCURRENCES and (after := read.next_after(found[-1] if found else at, ZoneInfo(zone))):
        found.append(after)
    return found


async def test_patterns_mean_what_they_mean_in_node(redis_url: str) -> None:
    """What we read, each version reads alike; what both read alike, we read, but for what is very rare.

    Version 5 refuses a list that names a value twice.
    """
    install_npm_packages()
    cases = Patterns(20).cases(CASES)

    async def node(package: str) -> list[list[int] | None]:
        async with scheduler_peer(package, redis_url, uuid.uuid4().hex) as peer:
            return list(await peer.call("occurrences", [cases, OCCURRENCES]))

    old, new = await asyncio.gather(node("bullmq"), node("bullmq-6"))
    mine = [ours(*case) for case in cases]
    read = [at for at in range(CASES) if mine[at] is not None]
    assert [(cases[at], mine[at], old[at]) for at in read if mine[at] != old[at]] == []
    assert [(cases[at], mine[at], new[at]) for at in read if new[at] is not None and mine[at] != new[at]] == []
    assert len(read) > 0.85 * CASES
    unread = [cases[at] for at in range(CASES) if mine[at] is None and old[at] is not None and old[at] == new[at]]
    assert len(unread) < 0.05 * CASES, unread


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
