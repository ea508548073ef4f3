"""What was delivered and what failed, over an hour, a day and a week."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from sqlalchemy import insert

from db import AttemptMinute, AttemptOutcome, Database
from federation.dashboard.node_site import NodeSite
from federation.dashboard.overview_page import Span, history
from federation.runtime.composition import Federation
from tests.workers.dashboard.browsing import Person

NOW = datetime(2026, 11, 27, 16, 44, 30, tzinfo=UTC)
AGES = (
    timedelta(0),
    timedelta(minutes=4),
    timedelta(hours=5),
    timedelta(hours=5, minutes=1),
    timedelta(days=6, hours=22),
)


async def counted(database: Database, now: datetime) -> None:
    """At each of these ages ten were delivered, and one failed of each kind."""
    outcomes = (AttemptOutcome.DELIVERED, AttemptOutcome.RETRYABLE, AttemptOutcome.PERMANENT)
    for age in AGES:
        minute = (now - age).replace(second=0, microsecond=0)
        for outcome, number in zip(outcomes, (10, 1, 1), strict=True):
            row = {"minute": minute, "outcome": outcome, "attempts": number, "latencies": []}
            await database.transact(lambda connection, row=row: connection.execute(insert(AttemptMinute).values(**row)))


@pytest.mark.parametrize(
    ("span", "first", "seen"),
    [
        (Span.HOUR, NOW - timedelta(minutes=59, seconds=30), {"16:40": 10, "16:44": 10}),
        (Span.DAY, NOW - timedelta(hours=23, minutes=54, seconds=30), {"11:40": 20, "16:40": 20}),
        (Span.WEEK, NOW - timedelta(days=6, hours=23, minutes=44, seconds=30), {"18:00": 10, "11:00": 20, "16:00": 20}),
    ],
)
async def test_minutes_are_added_up(database: Database, span: Span, first: datetime, seen: dict[str, int]) -> None:
    """On either database: by the minute, by ten minutes, by the hour; without gaps, and with nothing older."""
    await counted(database, NOW)
    times = await history(database, span, now=NOW)
    assert times[0].at == first
    assert {each.at - before.at for before, each in pairwise(times)} == {times[1].at - times[0].at}
    assert {each.at.strftime("%H:%M"): each.delivered for each in times if each.delivered} == seen
    assert [each.failed for each in times] == [each.delivered // 5 for each in times]


async def test_the_overview_goes_back_as_far_as_somebody_asks(federation: Federation, acting: NodeSite) -> None:
    """By links; the page goes on with what was asked for as it brings itself up to date."""
    await counted(federation.database, datetime.now(UTC))
    person = Person(acting.site.app)
    for over, delivered in (("hour", 20), ("day", 40), ("week", 50), ("nonsense", 20)):
        page = await person.sees(f"/?over={over}")
        assert f"{delivered} in all, at most" in page
        span = over if over != "nonsense" else "hour"
        assert re.findall(r'href="([^"]+)" aria-current="page">last', page) == [f"/?over={span}"]
        assert f'data-stream="/live?topic=overview&amp;over={span}"' in page
    async with acting.site.feed.listen("overview", (("over", "week"),)) as listener:
        told = await listener.take()
        assert told is not None
        assert "50 in all, at most" in told["overview-live"]
