"""What this node tells of its own users' follows; what it hears is in `tests/federation/node/test_replays.py`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

from db import Database
from federation.sealed.peers.follow_news import Direction, Pair, take_unfollow, time_to_tell

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HOUR = timedelta(hours=1)


def pair(direction: Direction = Direction.TOLD, follower: str = "alice") -> Pair:
    return Pair(direction=direction, server_url="https://b.example", follower_id=follower, following_id="bob")


async def tell(database: Database, now: datetime, after: datetime | None = None) -> datetime:
    async with database.transaction() as session:
        return await session.run_sync(partial(time_to_tell, pair=pair(), follow_id="f-1", now=now, after=after))


async def test_what_is_told_is_always_later_than_before(database: Database) -> None:
    """Receivers take the older of two words for one sent again, so a clock that goes back must not show."""
    steps = [(NOW, None), (NOW - HOUR, NOW + HOUR), (NOW, None), (NOW + 2 * HOUR, NOW)]
    told = [await tell(database, now, after) for now, after in steps]
    tick = timedelta(milliseconds=1)
    assert told == [NOW, NOW + HOUR + tick, NOW + HOUR + 2 * tick, NOW + 2 * HOUR]


async def test_pairs_are_told_apart(database: Database) -> None:
    """Neither what the server says, nor what is told of another user, is taken for what we told of alice."""
    for other in (pair(Direction.HEARD), pair(follower="alice "), pair(follower="")):
        take = partial(take_unfollow, pair=other, follow_id=None, told_at=NOW + HOUR, now=NOW)
        async with database.transaction() as session:
            assert await session.run_sync(take)
    assert await tell(database, NOW) == NOW
