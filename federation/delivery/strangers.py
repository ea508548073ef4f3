"""Registrations that never led to anything: anybody can make them, by the thousand."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, Connection, delete, exists, or_, select
from sqlmodel import col

from db import Database, DeliveryAttempt, DeliveryJob, Follow, Post, RotateChallengeToken, Server, ServerLink
from db.host import missing_of_host

KEEP_UNUSED_SERVERS: Final = timedelta(days=30)
BATCH: Final = 500


class UnusedServers:
    """Deletes registrations that are 30 days old and led to nothing.

    That means: no follow, post, delivery or rotation of either side, no delivery ever acknowledged, and nothing set by
    an operator. Such a server may register again, and is discovered when something is to be delivered to it. Without
    the host's `posts` nobody can tell, so none is deleted.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def purge(self, now: datetime) -> int:
        """Delete them in batches, and return how many there were."""
        async with self._database.read() as session:
            lacking = await (await session.connection()).run_sync(missing_of_host)
        if {Post.__tablename__, f"{Post.__tablename__}.federation_url"}.intersection(lacking):
            return 0
        before = now - KEEP_UNUSED_SERVERS
        batch = select(col(Server.id)).where(col(Server.created_at) < before, *_is_unused()).limit(BATCH)
        gone = delete(Server).where(col(Server.id).in_(batch)).returning(col(Server.id))

        def delete_batch(connection: Connection) -> int:
            return len(connection.execute(gone).all())

        total = count = await self._database.transact(delete_batch)
        while count == BATCH:
            count = await self._database.transact(delete_batch)
            total += count
        return total


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
