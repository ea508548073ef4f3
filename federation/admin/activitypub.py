"""What an administrator sees and does of ActivityPub: this node's actors, and the keys by which they sign."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session
from sqlmodel import col

from db import (
    ActivityActor,
    ActivityKey,
    Database,
    DeliveryJob,
    DeliveryPayload,
    DeliveryState,
    FollowDirection,
    FollowState,
)
from federation.activitypub.actors import Actor
from federation.activitypub.calls import parts_of
from federation.activitypub.keys import KeyUnreadable, StoredKey, in_use, open_sealed, secrets_of, successor
from federation.admin.follows import FollowCounts, counts_of
from federation.admin.words import moment
from federation.base.audit import Order, noted
from federation.protocol.keys import KeyRing

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

T = TypeVar("T")


class KeyState(StrEnum):
    """What a key does now."""

    IN_USE = "in use"
    """It signs, and is shown."""
    NEXT = "next"
    """It takes the place of the one in use when its time has come."""
    RETIRED = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A key pair of an actor, without the key. `opens`: whether this node's own keys open its private half."""

    key_id: str
    actor: str
    kind: str
    state: KeyState
    opens: bool
    created_at: datetime
    use_from: datetime
    retired_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRow:
    """An actor of this node. `key_id` is the key in use, None if there is none. It was removed at `removed_at`."""

    id: str
    is_instance: bool
    created_at: datetime
    removed_at: datetime | None
    key_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorPage:
    """Part of a list; `after` continues it, None at its end."""

    actors: Sequence[ActorRow]
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPage:
    """The keys of some actors, by actor; `after` is the last of these, and continues the list. None at its end."""

    keys: Sequence[KeyRow]
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnActor:
    """An actor of this node: its keys, how many deliveries in its name have a row, by state, and its follows."""

    actor: ActorRow
    keys: Sequence[KeyRow]
    states: Mapping[str, int]
    follows: FollowCounts

    @property
    def is_well(self) -> bool:
        """Whether its activities can be signed."""
        return any(key.state is KeyState.IN_USE and key.opens for key in self.keys)

    def sentences(self) -> Iterator[str]:
        """Yield the same as sentences for people."""
        actor = self.actor
        yield f"It is an actor of this node since {moment(actor.created_at)}."
        if actor.removed_at is not None:
            yield f"It was removed at {moment(actor.removed_at)}; what it signed can be verified for 30 days."
        if actor.key_id is None:
            yield "It has no key in use, so nothing is sent in its name."
        for key in self.keys:
            if key.state is KeyState.IN_USE:
                broken = "" if key.opens else "; this node's keys do not open it, so what it is to sign is held"
                yield f"It signs with {key.key_id}{broken}."
            elif key.state is KeyState.NEXT:
                yield f"From {moment(key.use_from)} on it signs with {key.key_id}."
        told = ", ".join(f"{number} {state}" for state, number in self.states.items())
        yield f"Deliveries in its name: {told or 'none is owed, or was given up lately'}."
        yield from self._followed()

    def _followed(self) -> Iterator[str]:
        followers, following = (self.follows.get(each, {}) for each in FollowDirection)
        accepted, asking = followers.get(FollowState.ACCEPTED, 0), followers.get(FollowState.PENDING, 0)
        yield f"Its followers: {accepted}{f'; {asking} more to be answered' if asking else ''}."
        accepted, asked = following.get(FollowState.ACCEPTED, 0), following.get(FollowState.PENDING, 0)
        yield f"It follows {accepted}{f', and has asked {asked} more' if asked else ''}."
        if self.follows:
            yield f"`federation activitypub follows --actor {self.actor.id}` lists them."


async def list_actors(federation: Federation, *, limit: int, after: str | None = None) -> ActorPage:
    """Return actors by URL, those that were removed, too."""
    query = select(*_ACTOR_COLUMNS).order_by(col(ActivityActor.id)).limit(limit + 1)
    if after is not None:
        query = query.where(col(ActivityActor.id) > after)
    rows = await federation.database.rows(query)
    keys = await _keys_of(federation, [row.id for row in rows[:limit]])
    used = {key.actor: key.key_id for key in keys if key.state is KeyState.IN_USE}
    actors = [ActorRow(**row._mapping, key_id=used.get(row.id)) for row in rows[:limit]]
    return ActorPage(actors=actors, after=actors[-1].id if len(rows) > limit else None)


async def list_keys(federation: Federation, *, limit: int, after: str | None = None) -> KeyPage:
    """Return the keys of up to *limit* actors, by actor; each actor's from the first one on."""
    actor = col(ActivityKey.actor_id)
    query = select(actor).distinct().order_by(actor).limit(limit + 1)
    if after is not None:
        query = query.where(actor > after)
    actors = [row.actor_id for row in await federation.database.rows(query)]
    keys = await _keys_of(federation, actors[:limit])
    return KeyPage(keys=keys, after=actors[limit - 1] if len(actors) > limit else None)


async def own_actor(federation: Federation, url: str) -> OwnActor | None:
    """Return the actor of this node with that URL, or None if there is none."""
    rows = await federation.database.rows(select(*_ACTOR_COLUMNS).where(col(ActivityActor.id) == url))
    if not rows:
        return None
    keys = await _keys_of(federation, [url])
    used = next((key.key_id for key in keys if key.state is KeyState.IN_USE), None)
    states = {row.state.value: row.number for row in await federation.database.rows(_in_the_name_of(url))}
    follows = await counts_of(federation.database, url)
    return OwnActor(actor=ActorRow(**rows[0]._mapping, key_id=used), keys=keys, states=states, follows=follows)


async def add_actor(federation: Federation, url: str, *, is_instance: bool, order: Order | None = None) -> Actor:
    """Make an actor with its keys, unless it is there; see `Actors.add`.

    Raises:
        ConfigurationError: this node has no ActivityPub.
        ValueError: the URL is not one of this node.
    """
    actors = parts_of(federation).actors
    return await _ordered(federation.database, partial(actors.add, actor_url=url, is_instance=is_instance), order)


async def remove_actor(federation: Federation, url: str, *, order: Order | None = None) -> bool:
    """Remove an actor; see `Actors.remove`. Return False if there is none.

    Raises:
        ConfigurationError: this node has no ActivityPub.
    """
    actors = parts_of(federation).actors
    known = select(col(ActivityActor.id)).where(col(ActivityActor.id) == url, col(ActivityActor.removed_at).is_(None))
    if not await federation.database.rows(known):
        return False
    await _ordered(federation.database, partial(actors.remove, actor_url=url), order)
    return True


async def rotate(federation: Federation, url: str, *, order: Order | None = None) -> Actor:
    """Give an actor another key; see `Actors.rotate`.

    Raises:
        ConfigurationError: this node has no ActivityPub.
        NoActorKey: there is no such actor.
    """
    return await _ordered(federation.database, partial(parts_of(federation).actors.rotate, actor_url=url), order)


async def _ordered(database: Database, work: Callable[[Session], T], order: Order | None) -> T:
    async with database.transaction() as session:
        done = await session.run_sync(work)
        if order is not None:
            await session.execute(noted(order, affected=1))
    return done


async def _keys_of(federation: Federation, actors: Sequence[str]) -> list[KeyRow]:
    query = select(*_KEY_COLUMNS).where(col(ActivityKey.actor_id).in_(actors))
    rows = await federation.database.rows(
        query.order_by(col(ActivityKey.actor_id), col(ActivityKey.use_from), col(ActivityKey.key_id))
    )
    now = federation.clock.now()
    stored: dict[str, list[StoredKey]] = {}
    for row in rows:
        key = StoredKey(row.key_id, row.private, row.public_pem, row.use_from, row.retired_at)
        stored.setdefault(row.actor_id, []).append(key)
    states = {}
    for keys in stored.values():
        for state, found in ((KeyState.IN_USE, in_use(keys, now)), (KeyState.NEXT, successor(keys, now))):
            if found is not None:
                states[found.key_id] = state
    return [
        KeyRow(
            key_id=row.key_id,
            actor=row.actor_id,
            kind=row.kind,
            state=states.get(row.key_id, KeyState.RETIRED),
            opens=opens(row.private, federation.keys),
            created_at=row.created_at,
            use_from=row.use_from,
            retired_at=row.retired_at,
        )
        for row in rows
    ]


def opens(private: str, ring: KeyRing | None) -> bool:
    """Tell whether the node's keys open a sealed key."""
    try:
        return bool(open_sealed(private, secrets_of(ring)))
    except KeyUnreadable:
        return False


def _in_the_name_of(url: str) -> Select[*tuple[DeliveryState, int]]:
    joined = col(DeliveryPayload.id) == col(DeliveryJob.payload_id)
    state = col(DeliveryJob.state)
    counts = select(state, func.count().label("number")).select_from(DeliveryJob).join(DeliveryPayload, joined)
    return counts.where(col(DeliveryPayload.actor) == url).group_by(state).order_by(state)


_ACTOR_COLUMNS: Final = tuple(
    getattr(ActivityActor, name) for name in ("id", "is_instance", "created_at", "removed_at")
)
_KEY_COLUMNS: Final = tuple(
    getattr(ActivityKey, name)
    for name in ("key_id", "actor_id", "kind", "private", "public_pem", "created_at", "use_from", "retired_at")
)
