"""The newest message about each follow, so that an older one, sent again by anybody, changes nothing.

Theory of operation. Follows and unfollows are signed, but whoever carried one may send it once more. Each has the id of
the follow, and the time at which the user asked for it, by the clock of the user's server. The newest of each (server,
follower, followed) is kept for 30 days. Times of one server are compared with each other, never with ours, so it does
not matter how wrong its clock is. It would matter if a clock were set back. Therefore an unfollow ends the follow that
it names, whatever the times say, and what this node tells of a follow is always later than what it told before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Final

from sqlalchemy import Executable, bindparam, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import FollowNews

MOST_PER_SERVER: Final = 10_000
"""For how many follows of one server the newest message is remembered: those noted last."""
TICK: Final = timedelta(milliseconds=1)
"""The resolution of times on the wire."""

_TABLE: Final = FollowNews.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_NEWEST: Final = select(_TABLE.c.follow_id, _TABLE.c.told_at).where(_TABLE.c.id == bindparam("key"))
_BEYOND: Final = (
    select(_TABLE.c.id)
    .where(_TABLE.c.server_url == bindparam("server"))
    .order_by(_TABLE.c.noted_at.desc())
    .offset(bindparam("most"))
)
_TRIM: Final = delete(_TABLE).where(_TABLE.c.id.in_(_BEYOND))


class Direction(StrEnum):
    """Whose users follow: another server's, which told us of it, or ours, of whom we told that server."""

    HEARD = "heard"
    TOLD = "told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A user who follows or followed, and the one who is followed; `server_url` is the other server."""

    direction: Direction
    server_url: str
    follower_id: str
    following_id: str

    @property
    def key(self) -> str:
        parts = (self.direction, self.server_url, self.follower_id, self.following_id)
        return _digest("".join(f"{len(part)} {part}" for part in parts))


def take_follow(session: Session, pair: Pair, *, follow_id: str, told_at: datetime, now: datetime) -> bool:
    """Note the follow. Return whether it is newer than everything heard of the pair; the newest one repeated is not."""
    newest = _newest(session, pair)
    name = _digest(follow_id)
    if newest is not None and (told_at < newest.told_at or (told_at, name) == (newest.told_at, newest.follow_id)):
        return False
    _note(session, pair, _Newest(follow_id=name, told_at=told_at), now=now, is_new=newest is None)
    return True


def take_unfollow(session: Session, pair: Pair, *, follow_id: str | None, told_at: datetime, now: datetime) -> bool:
    """Note the unfollow.

    Return whether it ends what was heard of the pair before: it is newer, or names the newest follow.
    """
    newest = _newest(session, pair)
    name = None if follow_id is None else _digest(follow_id)
    if newest is None:
        _note(session, pair, _Newest(follow_id=name or "", told_at=told_at), now=now, is_new=True)
        return True
    if told_at <= newest.told_at and name != newest.follow_id:
        return False
    latest = _Newest(follow_id=name or newest.follow_id, told_at=max(told_at, newest.told_at))
    if latest != newest:
        _note(session, pair, latest, now=now, is_new=False)
    return True


def time_to_tell(session: Session, pair: Pair, *, follow_id: str, now: datetime, after: datetime | None) -> datetime:
    """Note that the other server is told of the follow, and return the time to tell.

    That is now, or a moment later than *after* and everything that the server was told before.
    """
    newest = _newest(session, pair)
    past = (after, None if newest is None else newest.told_at)
    told_at = max([now, *(each + TICK for each in past if each is not None)])
    _note(session, pair, _Newest(follow_id=_digest(follow_id), told_at=told_at), now=now, is_new=newest is None)
    return told_at


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newest:
    follow_id: str
    told_at: datetime


def _newest(session: Session, pair: Pair) -> _Newest | None:
    row = session.execute(_NEWEST, {"key": pair.key}).one_or_none()
    return None if row is None else _Newest(follow_id=row.follow_id, told_at=row.told_at)


def _note(session: Session, pair: Pair, newest: _Newest, *, now: datetime, is_new: bool) -> None:
    row = {
        "id": pair.key,
        "server_url": pair.server_url,
        "follow_id": newest.follow_id,
        "told_at": newest.told_at,
        "noted_at": now,
    }
    session.execute(_upsert(session.get_bind().dialect.name), row)
    if is_new:
        session.execute(_TRIM, {"server": pair.server_url, "most": MOST_PER_SERVER})


@cache
def _upsert(dialect: str) -> Executable:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(_TABLE)
    changed = {name: insert.excluded[name] for name in ("follow_id", "told_at", "noted_at")}
    upsert: Executable = insert.on_conflict_do_update(index_elements=[_TABLE.c.id], set_=changed)
    return upsert


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
