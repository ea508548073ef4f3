"""The actor that stands for this node where it asks others for something: servers may show actors only to who signs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import select
from sqlmodel import col

from db import ActivityActor, Database
from federation.activitypub.actors import Actors
from federation.activitypub.documents import ACTIVITY_JSON, LD_JSON
from federation.activitypub.keys import ActorKeys
from federation.activitypub.signatures import sign_get
from federation.activitypub.wire import user_agent
from workers.clock import Clock

INSTANCE_PATH: Final = "/actor"
"""Where it is made if the application has made none."""

_FIRST: Final = (
    select(col(ActivityActor.id))
    .where(col(ActivityActor.is_instance), col(ActivityActor.removed_at).is_(None))
    .order_by(col(ActivityActor.created_at), col(ActivityActor.id))
    .limit(1)
)


class InstanceSigner:
    """Signs GETs in the name of the node that serves as *own_url*, by its first instance actor."""

    def __init__(self, *, own_url: str, database: Database, actors: Actors, keys: ActorKeys, clock: Clock) -> None:
        self._own_url = own_url
        self._database = database
        self._actors = actors
        self._keys = keys
        self._clock = clock
        self._actor: str | None = None

    async def __call__(self, url: str) -> Mapping[str, str]:
        """Return the headers of a signed GET for an activity or actor.

        Raises:
            KeyUnreadable: this process cannot open the actor's key.
            NoActorKey: it has none in use.
            SQLAlchemyError: the database failed.
        """
        self._actor = self._actor or await self._first()
        signed = sign_get(url=url, at=self._clock.now(), key=await self._keys.signing_key(self._actor))
        return {"Accept": f"{ACTIVITY_JSON}, {LD_JSON}", "User-Agent": user_agent(self._own_url), **signed}

    async def _first(self) -> str:
        found = await self._database.rows(_FIRST)
        if found:
            return str(found[0][0])
        actor = f"{self._own_url}{INSTANCE_PATH}"
        async with self._database.transaction() as session:
            await session.run_sync(self._actors.add, actor, is_instance=True)
        return actor
