"""Actors of this node: added, removed, and given other keys, in the transaction of whoever asks.

Theory of operation. Any process may add or change an actor, and two may at once. The first key has a name that follows
from the actor's, so that whoever makes it second finds it there; a rotation holds the row of the actor, and so finds
the key that another one has made. A key never changes, but for its seal and the end of its use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from sqlalchemy import Executable, Table, bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import ActivityActor, ActivityKey, Database, new_timed_id
from federation.activitypub.keys import (
    KEYS,
    KeyUnreadable,
    NoActorKey,
    StoredKey,
    in_use,
    make_private_key,
    open_sealed,
    public_pem,
    seal,
    secrets_of,
    successor,
)
from federation.base.errors import ConfigurationError
from federation.base.settings.settings import OWN_URL_VARIABLE
from federation.protocol.keys import SIGNING_SECRET_VARIABLE, KeyRing
from federation.protocol.urls import MAX_URL_CHARACTERS, canonical_origin
from workers.clock import Clock

ROTATION_AHEAD: Final = timedelta(minutes=10)
"""How long before it signs a new key is there: far longer than any process goes without a look at the keys."""
PAGE: Final = 1_000
LONGEST_ACTOR: Final = MAX_URL_CHARACTERS - 64
"""With the fragments of its keys it is a URL still."""
_SHOWN: Final = 200

_ESCAPE: Final = re.compile(r"%[0-9A-Fa-f]{2}")
_KIND: Final = "rsa"
_FIRST: Final = "#main-key"
# What every URL library sends as it is. A segment of dots would be resolved by some.
_PATH: Final = re.compile(r"(?!.*/\.{1,2}(?:[/?]|$))/(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor of this node, and the key that was made for it last."""

    id: str
    key_id: str
    public_pem: str


@dataclass(frozen=True, slots=True)
class Resealed:
    """How many keys were sealed anew, and how many could not be opened."""

    done: int
    unreadable: int


class Actors:
    """Writes actors and their keys, of RSA with so many *bits*, sealed under the present pair of *ring*."""

    def __init__(self, *, ring: KeyRing | None, bits: int, clock: Clock, own_url: str | None) -> None:
        self._ring = ring
        self._bits = bits
        self._clock = clock
        self._own_url = own_url

    def add(self, session: Session, actor_url: str, *, is_instance: bool = False) -> Actor:
        """Make an actor with a key, unless it is there; one that was removed is there again, with the key it had.

        A new key takes 0.1 s, in which SQLite's write lock may be held.

        Raises:
            ValueError: the URL is not one of this node; the message names it.
            ConfigurationError: this node has no name, or no keys under which to seal.
        """
        self._check(actor_url)
        known = session.execute(_KNOWN, {"actor": actor_url}).one_or_none()
        if known is None:
            _check_escapes(actor_url)
            self._make(session, actor_url, is_instance=is_instance)
        elif known.removed_at is not None:
            session.execute(_RETURNED, {"actor": actor_url})
        key = in_use(_keys_of(session, actor_url), self._clock.now())
        if key is None:
            raise NoActorKey(f"{actor_url} has no key in use")
        return Actor(actor_url, key.key_id, key.public_pem)

    def remove(self, session: Session, actor_url: str) -> None:
        """Note that an actor is no more. Its key signs on, for the news of that. One that is unknown is left alone."""
        session.execute(_REMOVED, {"actor": actor_url, "at": self._clock.now()})

    def rotate(self, session: Session, actor_url: str) -> Actor:
        """Give an actor another key, which takes the place of the present one in ten minutes.

        While a new key waits for its time, this returns that one.

        Raises:
            NoActorKey: there is no such actor.
            ConfigurationError: as for `add`.
        """
        if session.execute(_HELD, {"actor": actor_url}).rowcount == 0:  # type: ignore[attr-defined] # a CursorResult
            raise NoActorKey(f"{actor_url} is no actor of this node")
        now = self._clock.now()
        waiting = successor(_keys_of(session, actor_url), now)
        if waiting is not None:
            return Actor(actor_url, waiting.key_id, waiting.public_pem)
        begin = now + ROTATION_AHEAD
        session.execute(_RETIRED, {"actor": actor_url, "at": begin})
        return self._new_key(session, actor_url, f"{actor_url}#key-{new_timed_id()}", now=now, use_from=begin)

    def reseal(self, session: Session) -> Resealed:
        """Seal all keys under the present pair of the node that are sealed under an older one."""
        return reseal(session, self._ring)

    def _make(self, session: Session, actor_url: str, *, is_instance: bool) -> None:
        now = self._clock.now()
        values = {"id": actor_url, "name": found_by(actor_url), "created_at": now, "is_instance": is_instance}
        session.execute(_new(_ACTORS, session.get_bind().dialect.name), values)
        self._new_key(session, actor_url, actor_url + _FIRST, now=now, use_from=now)

    def _new_key(self, session: Session, actor_url: str, key_id: str, *, now: datetime, use_from: datetime) -> Actor:
        der = make_private_key(self._bits)
        actor = Actor(actor_url, key_id, public_pem(der))
        values = {
            "key_id": key_id,
            "actor_id": actor_url,
            "kind": _KIND,
            "private": seal(der, self._secret()),
            "public_pem": actor.public_pem,
            "created_at": now,
            "use_from": use_from,
        }
        session.execute(_new(_ACTOR_KEYS, session.get_bind().dialect.name), values)
        return actor

    def _secret(self) -> bytes:
        secrets = secrets_of(self._ring, now=True)
        if not secrets:
            raise ConfigurationError([f"{SIGNING_SECRET_VARIABLE}: not set; keys of actors are sealed under it"])
        return secrets[0]

    def _check(self, actor_url: str) -> None:
        if self._own_url is None:
            raise ConfigurationError([f"{OWN_URL_VARIABLE}: not set; actors have URLs of this node's own"])
        origin = canonical_origin(self._own_url)
        shown = f"actor {actor_url[:_SHOWN]!r}"
        if not actor_url.startswith(f"{origin}/"):
            raise ValueError(f"{shown}: not on this node's own origin, {origin}")
        if len(actor_url) > LONGEST_ACTOR:
            raise ValueError(f"{shown}: longer than {LONGEST_ACTOR} characters")
        if not _PATH.fullmatch(actor_url, len(origin)):
            raise ValueError(f"{shown}: a fragment, or characters or dots that are written in more than one way")


def _check_escapes(actor_url: str) -> None:
    """Check that each escape of a new actor's URL is needed, and has one spelling.

    Raises:
        ValueError: others would ask for another URL. Mastodon writes `%40` as `@`, and looks for what we do not have.
    """
    for escape in _ESCAPE.findall(actor_url):
        others = quote(unquote_to_bytes(escape), safe="!$&'()*+,;=:@")
        if others != escape:
            raise ValueError(f"actor {actor_url[:_SHOWN]!r}: {escape}, which others write as {others}")


def found_by(actor_url: str) -> str:
    """Return what an actor is found by for an account: the end of its URL as it is written, without `@` or case."""
    return actor_url.rpartition("/")[2].removeprefix("@").lower()


def reseal(session: Session, ring: KeyRing | None) -> Resealed:
    """Seal all keys under the present pair of *ring* that are sealed under an older one. A second time does nothing."""
    secrets, done, unreadable, after = secrets_of(ring, now=True), 0, 0, ""
    while page := session.execute(_SEALED, {"after": after, "most": PAGE}).all():
        resealed = [(row.key_id, _resealed(row.private, secrets)) for row in page]
        changed = [{"key": key_id, "sealed": sealed} for key_id, sealed in resealed if sealed]
        if changed:
            session.execute(_RESEALED, changed)
        done += len(changed)
        unreadable += sum(sealed is None for _, sealed in resealed)
        after = page[-1].key_id
    return Resealed(done, unreadable)


async def reseal_all(database: Database, ring: KeyRing | None) -> Resealed:
    """Do what `reseal` does, in a transaction of its own: before the old pair goes, which alone opens what is left.

    Raises:
        SQLAlchemyError: the database failed.
    """
    async with database.transaction() as session:
        return await session.run_sync(reseal, ring)


def _resealed(private: str, secrets: Sequence[bytes]) -> str | None:
    """Return the key sealed anew; nothing if it is under the first secret already, None if it is under none."""
    try:
        return "" if open_sealed(private, secrets[:1]) else None
    except KeyUnreadable:
        pass
    try:
        return seal(open_sealed(private, secrets[1:]), secrets[0])
    except KeyUnreadable:
        return None


def _keys_of(session: Session, actor_url: str) -> list[StoredKey]:
    return [StoredKey(*row) for row in session.execute(KEYS, {"actor_id": actor_url})]


@cache
def _new(table: Table, dialect: str) -> Executable:
    """Make the insert of a row that leaves one alone that is there."""
    insert: Executable = (postgresql if dialect == "postgresql" else sqlite).insert(table).on_conflict_do_nothing()
    return insert


_ACTORS: Final = ActivityActor.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_ACTOR_KEYS: Final = ActivityKey.__table__  # type: ignore[attr-defined] # as above
_KNOWN: Final = select(_ACTORS.c.removed_at).where(_ACTORS.c.id == bindparam("actor"))
_ONE: Final = update(_ACTORS).where(_ACTORS.c.id == bindparam("actor"))
_HELD: Final = _ONE.values(removed_at=_ACTORS.c.removed_at)
"""It changes nothing, but on either kind of database nobody else gets past it until the transaction ends."""
_RETURNED: Final = _ONE.values(removed_at=None)
_REMOVED: Final = _ONE.where(_ACTORS.c.removed_at.is_(None)).values(removed_at=bindparam("at"))
_RETIRED: Final = (
    update(_ACTOR_KEYS)
    .where(_ACTOR_KEYS.c.actor_id == bindparam("actor"), _ACTOR_KEYS.c.retired_at.is_(None))
    .values(retired_at=bindparam("at"))
)
_SEALED: Final = (
    select(_ACTOR_KEYS.c.key_id, _ACTOR_KEYS.c.private)
    .where(_ACTOR_KEYS.c.key_id > bindparam("after"))
    .order_by(_ACTOR_KEYS.c.key_id)
    .limit(bindparam("most"))
)
_RESEALED: Final = (
    update(_ACTOR_KEYS).where(_ACTOR_KEYS.c.key_id == bindparam("key")).values(private=bindparam("sealed"))
)
