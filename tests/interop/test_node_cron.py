"""Cron patterns, read by us and by the `cron-parser` of each of Node's versions."""

from __future__ import annotations

import asyncio
import uuid
from zoneinfo import ZoneInfo

from tests.interop.cron_patterns import Patterns
from tests.interop.peer import install_npm_packages, scheduler_peer
from workers.cron import UnreadablePattern, read_pattern

CASES = 1_000
OCCURRENCES = 1


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
