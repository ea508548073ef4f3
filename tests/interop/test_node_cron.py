"""Cron patterns, read by us and by the `cron-parser` of each of Node's versions.

`tests/workers/test_cron_clocks.py` holds us to what clocks show in the nights in which they change.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from tests.interop.cron_patterns import Patterns, is_odd
from tests.interop.peer import install_npm_packages, scheduler_peer
from tests.workers.test_cron_clocks import DAY, changes, patterns, zones
from workers.cron import UnreadablePattern, read_pattern

CASES = 1_000
OCCURRENCES = 1


def ours(pattern: str, zone: str, at: int, count: int = OCCURRENCES) -> list[int] | None:
    """What follows, as `occurrences` in Node tells it."""
    try:
        read = read_pattern(pattern)
    except UnreadablePattern:
        return None
    found: list[int] = []
    while len(found) < count and (after := read.next_after(found[-1] if found else at, ZoneInfo(zone))):
        found.append(after)
    return found


async def test_patterns_mean_what_they_mean_in_node(redis_url: str) -> None:
    """What we read, each version reads alike; what both read alike, we read, but for what is very rare.

    Version 5 refuses a list that names a value twice. They may differ from us where they leave out a change of the
    clocks, or run twice what comes once.
    """
    install_npm_packages()
    cases = Patterns(20).cases(CASES)

    async def node(package: str) -> list[list[int] | None]:
        async with scheduler_peer(package, redis_url, uuid.uuid4().hex) as peer:
            return list(await peer.call("occurrences", [cases, OCCURRENCES]))

    old, new = await asyncio.gather(node("bullmq"), node("bullmq-6"))
    mine = [ours(*case) for case in cases]
    read = [at for at in range(CASES) if mine[at] is not None]
    differ = [at for at in read if mine[at] != old[at] or (new[at] is not None and mine[at] != new[at])]
    assert [(cases[at], mine[at], old[at], new[at]) for at in differ if not is_odd(*cases[at][1:])] == []
    assert len(differ) < 0.02 * CASES
    assert len(read) > 0.85 * CASES
    unread = [cases[at] for at in range(CASES) if mine[at] is None and old[at] is not None and old[at] == new[at]]
    assert len(unread) < 0.05 * CASES, unread


def is_usual(zone: ZoneInfo, change: int) -> bool:
    """Whether the clocks change by one hour, at a full one, and not at midnight."""
    before, after = (datetime.fromtimestamp(at, zone) for at in (change - 1, change))
    by_one_hour = (before.minute, after.minute) == (59, 0) and abs(after.hour - before.hour - 1) == 1
    return by_one_hour and before.date() == after.date() and after.hour > 0


@pytest.mark.full
@pytest.mark.timeout(1_800)
async def test_nightly_times_come_when_cron_parser_5_says(redis_url: str) -> None:
    """In each zone, within two days of each change of the usual kind; of others, `docs/queue/recurring.md` tells."""
    install_npm_packages()
    nightly = [times.text for times in patterns(20, seed=3) if times.weekdays is None]
    usual = [(zone.key, change) for zone in zones() for change in changes(zone) if is_usual(zone, change)]
    assert len(usual) > 200
    async with scheduler_peer("bullmq-6", redis_url, uuid.uuid4().hex) as peer:
        for start in range(0, len(usual), 20):
            cases = [(text, zone, (at - 2 * DAY) * 1_000) for zone, at in usual[start : start + 20] for text in nightly]
            node: Sequence[list[int] | None] = await peer.call("occurrences", [cases, 4])
            mine = [ours(*case, count=4) for case in cases]
            assert [(case, *both) for case, *both in zip(cases, mine, node, strict=True) if both[0] != both[1]] == []
