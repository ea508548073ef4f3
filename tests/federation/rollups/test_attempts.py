"""Attempts are counted once each, whatever order transactions commit in; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, func, insert, select, update
from sqlmodel import col

from db import AttemptMinute, AttemptOutcome, Database, DeliveryAttempt, RollupPosition
from federation.admin.overview import last_hour, quantile
from federation.rollups import attempts
from federation.rollups.attempts import BOUNDS_MS, AttemptMinutes

NOW = datetime.now(UTC).replace(second=30, microsecond=0)
DELIVERED, RETRYABLE = AttemptOutcome.DELIVERED, AttemptOutcome.RETRYABLE


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSE", timedelta(milliseconds=1))


def rows(
    number: int, outcome: AttemptOutcome = DELIVERED, *, at: datetime = NOW, ms: int = 7
) -> list[dict[str, object]]:
    return [
        {
            "delivery_id": f"{outcome}-{at}-{ms}-{each}",
            "job_name": "post",
            "server_url": "https://peer.example",
            "attempt": 1,
            "started_at": at,
            "duration_ms": ms,
            "outcome": outcome,
        }
        for each in range(number)
    ]


async def add(database: Database, *values: Sequence[Mapping[str, object]]) -> None:
    async with database.transaction() as session:
        await session.execute(insert(DeliveryAttempt), [each for some in values for each in some])


async def counted(database: Database) -> dict[tuple[datetime, AttemptOutcome], int]:
    query = select(col(AttemptMinute.minute), col(AttemptMinute.outcome), col(AttemptMinute.attempts))
    return {(row.minute, row.outcome): row.attempts for row in await database.rows(query)}


async def total(database: Database) -> int:
    return sum((await counted(database)).values())


async def test_attempts_are_added_to_their_minutes(database: Database) -> None:
    """By outcome; a second run counts what came since, and a third nothing."""
    minute, before = NOW.replace(second=0), NOW.replace(second=0) - timedelta(minutes=1)
    count = AttemptMinutes(database)
    await add(database, rows(3), rows(2, RETRYABLE), rows(1, at=before))
    assert await count() == 6
    assert await counted(database) == {(minute, DELIVERED): 3, (minute, RETRYABLE): 2, (before, DELIVERED): 1}
    await add(database, rows(4, ms=8), rows(1, AttemptOutcome.PERMANENT))
    assert (await count(), await count()) == (5, 0)
    assert (await counted(database))[minute, DELIVERED] == 7
    hour = await last_hour(database, now=NOW)
    assert hour.attempts == {DELIVERED: 8, RETRYABLE: 2, AttemptOutcome.PERMANENT: 1, AttemptOutcome.PARKED: 0}
    assert [each.attempts[DELIVERED] for each in hour.minutes[-2:]] == [1, 7]
    assert [(each.at, len(hour.minutes)) for each in hour.minutes[:1]] == [(minute - timedelta(minutes=59), 60)]


async def test_a_node_begins_with_its_last_hour(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts it in pages."""
    monkeypatch.setattr(attempts, "PAGE", 2)
    await add(database, rows(5, at=NOW - timedelta(hours=3)), rows(5))
    assert await AttemptMinutes(database)() == 5
    assert await total(database) == 5


async def test_two_at_once_count_everything_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is second finds the position moved."""
    monkeypatch.setattr(attempts, "PAGE", 3)
    await AttemptMinutes(database)()
    await add(database, rows(20))
    done = await asyncio.gather(*(AttemptMinutes(database)() for _ in range(3)))
    await AttemptMinutes(database)()
    assert await total(database) == 20
    assert sum(done) <= 20


async def test_latencies_are_interpolated(database: Database) -> None:
    """Of those that delivered."""
    await add(database, rows(90, ms=100), rows(10, ms=12_000), rows(50, RETRYABLE, ms=15_000))
    await AttemptMinutes(database)()
    hour = await last_hour(database, now=NOW)
    assert hour.p50_ms == pytest.approx(100, rel=0.33)
    assert hour.p95_ms == pytest.approx(12_000, rel=0.33)
    empty = await last_hour(database, now=NOW + timedelta(hours=2))
    assert (empty.p50_ms, empty.p95_ms) == (None, None)


@pytest.mark.parametrize("ms", [0, 1, 4, 250, 9_000, 30_000])
def test_a_quantile_lies_near_the_value(ms: int) -> None:
    """Within its bucket; what exceeds every bound is told as the last."""
    bucket = next(index for index, bound in enumerate(BOUNDS_MS) if ms <= bound)
    latencies = [0] * (len(BOUNDS_MS) + 1)
    latencies[bucket] = 10
    lower = BOUNDS_MS[bucket - 1] if bucket else 0
    assert lower <= (quantile(latencies, 0.5) or 0) <= BOUNDS_MS[bucket]
    assert quantile([0] * len(BOUNDS_MS) + [1], 0.5) == BOUNDS_MS[-1]


async def test_minutes_are_kept_for_a_week(database: Database) -> None:
    count = AttemptMinutes(database)
    await count()
    await add(database, rows(1, at=NOW - timedelta(days=8)), rows(1))
    await count()
    assert await total(database) == 1


async def test_an_emptied_log_is_counted_from_its_beginning(database: Database) -> None:
    """SQLite gives the first numbers again."""
    count = AttemptMinutes(database)
    await count()
    await add(database, rows(5))
    await count()
    async with database.transaction() as session:
        await session.execute(delete(DeliveryAttempt))
    await count()
    await add(database, rows(2, ms=9))
    await count()
    assert await total(database) == 7


@pytest.fixture
async def postgres(migrated_postgres_url: str) -> AsyncIterator[Database]:
    opened = Database(migrated_postgres_url)
    yield opened
    await opened.close()


async def test_a_transaction_that_commits_late_is_counted(
    postgres: Database, migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count waits for it, in the next run if it takes long; and in that next run does not wait for newer ones."""
    monkeypatch.setattr(attempts, "LONGEST_WAIT", timedelta(milliseconds=20))
    count, elsewhere, later = AttemptMinutes(postgres), Database(migrated_postgres_url), Database(migrated_postgres_url)
    await count()
    async with AsyncExitStack() as newer:
        async with elsewhere.transaction() as slow:
            await slow.execute(insert(DeliveryAttempt), rows(3))
            await add(postgres, rows(4, ms=8))
            assert (await count(), await count(), await total(postgres)) == (0, 0, 0)
            overlapping = await newer.enter_async_context(later.transaction())
            await overlapping.execute(select(func.txid_current()))
        assert (await count(), await total(postgres)) == (7, 7)
    await elsewhere.close()
    await later.close()


async def test_a_horizon_of_another_server_is_forgotten(postgres: Database) -> None:
    """As a database has it that was moved while a count waited."""
    count = AttemptMinutes(postgres)
    await count()
    await add(postgres, rows(4))
    async with postgres.transaction() as session:
        await session.execute(update(RollupPosition).values(upto=10**9, horizon=10**15))
    assert await count() == 4
