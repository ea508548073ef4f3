"""The relay ranking of the analytics, as relays are chosen by it; on SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from db import Database, RelayCandidate
from federation.sealed.relays.peers import MAX_AGE, RelayRanking

TODAY = datetime.now(UTC).date()


def candidate(name: str, rank: int, *, age: timedelta = timedelta(days=1)) -> RelayCandidate:
    return RelayCandidate(
        server_url=f"https://{name}.example", rank=rank, as_of=TODAY - age, generation=1, score=1 / rank
    )


async def test_the_best_come_first(database: Database) -> None:
    """A ranking of more than a week ago is nobody's advice any more."""
    ranking = RelayRanking(database)
    async with database.transaction() as session:
        session.add_all([candidate("second", 2), candidate("first", 1), candidate("old", 1, age=MAX_AGE * 2)])
    assert await ranking() == ["https://first.example", "https://second.example"]
    await ranking.close()


async def test_without_analytics_nobody_is_ranked(database: Database) -> None:
    """Relays are then chosen by merit alone."""
    ranking = RelayRanking(database)
    assert await ranking() == []
    await ranking.close()
