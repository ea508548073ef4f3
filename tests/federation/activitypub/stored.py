"""Actors and their keys as they are stored, which cost no RSA: nothing opens them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import update
from sqlmodel import col

from db import ActivityActor, ActivityKey, Database
from federation.activitypub.actors import found_by


async def add_actor(
    database: Database, url: str, *, at: datetime, is_instance: bool = False, removed_at: datetime | None = None
) -> None:
    """Store an actor and its key."""
    actor = ActivityActor(id=url, name=found_by(url), created_at=at, is_instance=is_instance, removed_at=removed_at)
    async with database.transaction() as session:
        session.add_all([actor, _key(url, f"{url}#main-key", at)])


async def change_key(database: Database, url: str, *, now: datetime, at: datetime) -> None:
    """Let another key take the place of the actor's only one."""
    async with database.transaction() as session:
        await session.execute(update(ActivityKey).where(col(ActivityKey.actor_id) == url).values(retired_at=at))
        session.add(_key(url, f"{url}#key-2", now, use_from=at))


def _key(url: str, key_id: str, at: datetime, *, use_from: datetime | None = None) -> ActivityKey:
    return ActivityKey(
        key_id=key_id,
        actor_id=url,
        kind="rsa",
        private="sealed",
        public_pem=f"PEM of {key_id}",
        created_at=at,
        use_from=use_from or at,
    )
