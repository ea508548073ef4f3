"""Removing what ActivityPub's wire has kept long enough."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, Connection, Select, delete, or_, select, tuple_
from sqlalchemy.orm import Mapped
from sqlmodel import col

from db import (
    ActivityActor,
    ActivityFollow,
    ActivityInbox,
    ActivityKey,
    Database,
    ReceivedActivity,
    RemoteActorKey,
    UndoneFollow,
)
from federation.activitypub.undone import REMEMBERED
from federation.retention import in_batches

KEEP_INBOXES: Final = timedelta(days=90)
"""Since something was last found out about them: a while longer than they are skipped."""
KEEP_RETIRED_KEYS: Final = timedelta(days=30)
KEEP_REMOTE_KEYS: Final = timedelta(days=30)
"""Since they were fetched last."""
KEEP_FOLLOWS: Final = timedelta(days=30)
"""Of an actor of ours that was removed: then it is not shown any more, and could not come back with them."""
KEEP_RECEIVED: Final = timedelta(days=30)
"""What comes a second time after that is new: a signature is not believed for as long."""
BATCH: Final = 500


class ActivityPurge:
    """Deletes what is known of inboxes after 90 days in which nothing was heard of them, and keys after 30 days.

    Those of our actors 30 days after their use, those of others if they were not fetched again in that time.

    What others sent goes after 30 days, and so do the follows of an actor of ours that was removed. Follows that were
    undone before they came are forgotten when they may come.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def __call__(self, now: datetime) -> Mapping[str, int]:
        """Delete what is too old at that time, in batches. Return how many rows of each kind there were.

        Raises:
            SQLAlchemyError: the database failed; what was deleted by then is gone.
        """
        heard = (ActivityInbox.gone_at, ActivityInbox.missing_last, ActivityInbox.tried_at)
        quiet = [or_(col(each).is_(None), col(each) < now - KEEP_INBOXES) for each in heard]
        retired = col(ActivityKey.retired_at) < now - KEEP_RETIRED_KEYS
        fetched = col(RemoteActorKey.fetched_at) < now - KEEP_REMOTE_KEYS
        removed = col(ActivityActor.removed_at) < now - KEEP_FOLLOWS
        received = col(ReceivedActivity.received_at) < now - KEEP_RECEIVED
        undone = col(UndoneFollow.undone_at) < now - REMEMBERED
        return {
            "inboxes": await self._delete(ActivityInbox, col(ActivityInbox.url), *quiet),
            "actor_keys": await self._delete(ActivityKey, col(ActivityKey.key_id), retired),
            "remote_keys": await self._delete(RemoteActorKey, col(RemoteActorKey.key_id), fetched),
            "received": await self._delete(ReceivedActivity, col(ReceivedActivity.activity_hash), received),
            "undone_follows": await self._delete(UndoneFollow, col(UndoneFollow.follow_hash), undone),
            "follows": await self._delete_follows(select(col(ActivityActor.id)).where(removed)),
        }

    async def _delete_follows(self, actors: Select[str]) -> int:
        keys = (col(ActivityFollow.local_actor), col(ActivityFollow.remote_actor), col(ActivityFollow.direction))
        some = select(*keys).where(keys[0].in_(actors)).limit(BATCH)
        gone = delete(ActivityFollow).where(tuple_(*keys).in_(some)).returning(*keys)

        def delete_batch(connection: Connection) -> int:
            return len(connection.execute(gone).all())

        return await in_batches(self._database, delete_batch, BATCH)

    async def _delete(
        self,
        model: type[ActivityInbox | ActivityKey | ReceivedActivity | RemoteActorKey | UndoneFollow],
        key: Mapped[str],
        *expired: ColumnElement[bool],
    ) -> int:
        gone = delete(model).where(key.in_(select(key).where(*expired).limit(BATCH))).returning(key)

        def delete_batch(connection: Connection) -> int:
            return len(connection.execute(gone).all())

        return await in_batches(self._database, delete_batch, BATCH)
