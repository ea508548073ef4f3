"""Follows that were undone before they came.

Theory of operation. Servers send again what we could not take, and meanwhile go on: so an Undo may come before its
Follow, which would then leave a follower who is none. Such an Undo is remembered for six hours, as Mastodon does, by
its actor and the Follow's id.

Misskey names all Follows of a pair alike, so the one that comes next may be a later one. Of the two harms, one that its
actor sees and can repeat is the lesser: a Follow is dropped once, and his next one counts. That holds as an Undo is not
remembered whose Follow has come before, be it to be dropped.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cache
from hashlib import sha256
from typing import Final

from sqlalchemy import Executable, bindparam, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import UndoneFollow
from federation.activitypub.received import taken_back
from federation.protocol.urls import origin_of

REMEMBERED: Final = timedelta(hours=6)
MOST_PER_ORIGIN: Final = 1_000
"""The oldest are forgotten: what was overtaken mostly comes within minutes."""


def remember(session: Session, actor: str, follow_id: str, now: datetime) -> None:
    """Note that an actor has undone a Follow that has not come. One that came and failed is not tried again."""
    if taken_back(session, follow_id, actor=actor):
        return
    server_url = origin_of(actor)
    new = {"follow_hash": _hash(actor, follow_id), "server_url": server_url, "undone_at": now}
    session.execute(_made(session.get_bind().dialect.name), new)
    session.execute(_OLDEST, {"server": server_url})


def was_undone(session: Session, actor: str, follow_id: str, now: datetime) -> bool:
    """Tell whether an actor has undone this Follow lately, and forget that."""
    found = session.execute(_TAKEN, {"hash": _hash(actor, follow_id), "since": now - REMEMBERED})
    return found.one_or_none() is not None


def _hash(actor: str, follow_id: str) -> str:
    return sha256(f"{actor}\n{follow_id}".encode()).hexdigest()


_TABLE: Final = UndoneFollow.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core skips the ORM
_TAKEN: Final = (
    delete(_TABLE)
    .where(_TABLE.c.follow_hash == bindparam("hash"), _TABLE.c.undone_at > bindparam("since"))
    .returning(_TABLE.c.follow_hash)
)
_IS_THERE: Final = _TABLE.c.server_url == bindparam("server")
_LAST: Final = select(_TABLE.c.undone_at).where(_IS_THERE).order_by(_TABLE.c.undone_at.desc())
_OLDEST: Final = delete(_TABLE).where(
    _IS_THERE, _TABLE.c.undone_at < _LAST.offset(MOST_PER_ORIGIN - 1).limit(1).scalar_subquery()
)


@cache
def _made(dialect: str) -> Executable:
    insert = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(_TABLE)
    again = {"undone_at": insert.excluded.undone_at}
    return insert.on_conflict_do_update(index_elements=["follow_hash"], set_=again)
