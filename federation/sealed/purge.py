"""Removing what the sealed wire has kept long enough.

Most of it are registrations that never led to anything: anybody can make them, by the thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, delete, exists, or_, select
from sqlmodel import col

from db import (
    Database,
    DeliveryAttempt,
    DeliveryJob,
    Follow,
    FollowNews,
    Post,
    RotateChallengeToken,
    Server,
    ServerLink,
)
from db.host import missing_of_host
from federation.retention import in_batches

KEEP_FOLLOW_NEWS: Final = timedelta(days=30)
KEEP_UNUSED_SERVERS: Final = timedelta(days=30)
BATCH: Final = 500


class SealedPurge:
    """Deletes expired rotation challenges, notes on follows after 30 days, and registrations that led to nothing.

    Those are 30 days old, and have no follow, post, delivery or rotation of either side, no delivery ever acknowledged,
    and nothing set by an operator. Such a server may register again, and is discovered when something is to be
    delivered to it. Without the host's `posts` nobody can tell, so none is deleted.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def __call__(self, now: datetime) -> Mapping[str, int]:
        """Delete what is too old at that time, in batches. Return how many rows of each kind there were.

        Raises:
            SQLAlchemyError: the database failed; what was deleted by then is gone.
        """
        return {
            "rotations": await self._delete(RotateChallengeToken, col(RotateChallengeToken.expires_at) < now),
            "follow_news": await self._delete(FollowNews, col(FollowNews.noted_at) < now - KEEP_FOLLOW_NEWS),
            "servers": await self._delete_unused_servers(now),
        }

    async def _delete_unused_servers(self, now: datetime) -> int:
        async with self._database.read() as session:
            lacking = await (await session.connection()).run_sync(missing_of_host)
        if {Post.__tablename__, f"{Post.__tablename__}.federation_url"}.intersection(lacking):
            return 0
        return await self._delete(Server, col(Server.created_at) < now - KEEP_UNUSED_SERVERS, *_is_unused())

    async def _delete(
        self, model: type[RotateChallengeToken | FollowNews | Server], *expired: ColumnElement[bool]
    ) -> int:
        batch = select(col(model.id)).where(*expired).limit(BATCH)
        gone = delete(model).where(col(model.id).in_(batch)).returning(col(model.id))
        return await in_batches(self._database, lambda connection: len(connection.execute(gone).all()), BATCH)


def _is_unused() -> Iterator[ColumnElement[bool]]:
    url, link = col(Server.url), col(ServerLink.server_url)
    yield ~exists().where(
        link == url,
        or_(
            col(ServerLink.acknowledged),
            col(ServerLink.last_success_at).is_not(None),
            col(ServerLink.operator_hold),
            col(ServerLink.profile).is_not(None),
        ),
    )
    for named in (
        col(DeliveryAttempt.server_url),
        col(Follow.follower_server_url),
        col(Follow.following_server_url),
        col(Post.federation_url),
        col(RotateChallengeToken.server_url),
        # By its index, not as a list: once that is longer than `work_mem`, PostgreSQL walks along it for each server.
        col(DeliveryJob.server_url),
    ):
        yield ~exists().where(named == url)
