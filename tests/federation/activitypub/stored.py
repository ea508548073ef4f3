"""Actors and their keys as they are stored, without what makes or opens keys."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlmodel import col

from db import ActivityActor, ActivityKey, Database


@dataclass(frozen=True, slots=True)
class Shown:
    """The public half of a key."""

    key_id: str
    public_pem: str
    changes_at: datetime | None


@dataclass(slots=True)
class RowKeys:
    """An actor's only key; that it changes at a time is the test's to say."""

    database: Database
    changes_at: datetime | None = None

    async def served(self, actor_id: str) -> Shown | None:
        columns = (col(ActivityKey.key_id), col(ActivityKey.public_pem))
        rows = await self.database.rows(select(*columns).where(col(ActivityKey.actor_id) == actor_id))
        return Shown(rows[0][0], rows[0][1], self.changes_at) if rows else None


async def add_actor(
    database: Database, url: str, *, at: datetime, is_instance: bool = False, removed_at: datetime | None = None
) -> None:
    """Store an actor with a key that opens nothing."""
    actor = ActivityActor(id=url, created_at=at, is_instance=is_instance, removed_at=removed_at)
    key = ActivityKey(
        key_id=f"{url}#main-key",
        actor_id=url,
        kind="rsa",
        private="sealed",
        public_pem=f"PEM of {url}",
        created_at=at,
        use_from=at,
    )
    async with database.transaction() as session:
        session.add_all([actor, key])
