"""Who follows whom by ActivityPub, as an administrator sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import ColumnElement, bindparam, func, or_, select, tuple_
from sqlmodel import col

from db import ActivityActor, ActivityFollow, Database, FollowDirection, FollowState
from federation.activitypub.calls import parts_of
from federation.admin.scans import CursorError

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

FollowCounts: TypeAlias = dict[FollowDirection, dict[FollowState, int]]
"""How many follows of an actor there are; states and directions with none are left out."""


class NoSuchActor(LookupError):
    """There are no follows of an actor, and no such actor of this node."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{url} is no actor of this node")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRow:
    """A follow. As a `follower` the remote actor follows ours, `following` is the reverse.

    `since` is when it came, or when its state became what it is. `follow_id` is the id of the Follow activity.
    """

    local_actor: str
    remote_actor: str
    direction: FollowDirection
    state: FollowState
    since: datetime
    inbox: str
    shared_inbox: str | None
    follow_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowPage:
    """Part of a list; `after` continues it, None at its end."""

    follows: Sequence[FollowRow]
    after: str | None


async def list_follows(
    federation: Federation,
    *,
    limit: int,
    actor: str | None = None,
    direction: FollowDirection | None = None,
    state: FollowState | None = None,
    server_url: str | None = None,
    after: str | None = None,
) -> FollowPage:
    """Return follows by our actor, and then by the other: of one of ours, in a state, with actors of one server.

    Raises:
        ConfigurationError: this node has no ActivityPub.
        CursorError: `after` is no end of such a list.
        NoSuchActor: there are none, and no such actor either.
    """
    parts_of(federation)
    wanted = [] if after is None else [tuple_(*_KEY) > tuple_(*_read(after))]
    wanted += [] if actor is None else [col(ActivityFollow.local_actor) == actor]
    wanted += [] if direction is None else [col(ActivityFollow.direction) == direction]
    wanted += [] if state is None else [col(ActivityFollow.state) == state]
    wanted += [] if server_url is None else [_is_on(server_url)]
    query = select(*_COLUMNS).where(*wanted).order_by(*_KEY).limit(limit + 1)
    rows = await federation.database.rows(query)
    if not rows and actor is not None and not await _is_ours(federation.database, actor):
        raise NoSuchActor(actor)
    found = [FollowRow(**row._mapping) for row in rows[:limit]]
    return FollowPage(follows=found, after=_cursor(found[-1]) if len(rows) > limit else None)


async def counts_of(database: Database, actor: str) -> FollowCounts:
    """Count the follows of an actor of ours."""
    return await _counts(database, col(ActivityFollow.local_actor) == actor)


async def counts_with(database: Database, actor: str) -> FollowCounts:
    """Count the follows of ours with an actor of others."""
    return await _counts(database, col(ActivityFollow.remote_actor) == actor)


async def _counts(database: Database, wanted: ColumnElement[bool]) -> FollowCounts:
    way, state = col(ActivityFollow.direction), col(ActivityFollow.state)
    query = select(way, state, func.count().label("number")).where(wanted)
    found: FollowCounts = {}
    for row in await database.rows(query.group_by(way, state).order_by(way, state)):
        found.setdefault(row.direction, {})[row.state] = row.number
    return found


async def _is_ours(database: Database, actor: str) -> bool:
    return bool(await database.rows(select(col(ActivityActor.id)).where(col(ActivityActor.id) == actor)))


def _is_on(server_url: str) -> ColumnElement[bool]:
    """Tell which of the others are on a server, whose name may be written in capitals in their ids."""
    remote = func.lower(col(ActivityFollow.remote_actor))
    return or_(*(remote.startswith(f"{server_url}{mark}", autoescape=True) for mark in "/?#"))


def _cursor(row: FollowRow) -> str:
    """Write the key of a follow: an actor of ours has no space in its URL, the other's may have any character."""
    return f"{row.local_actor} {row.direction} {row.remote_actor}"


def _read(cursor: str) -> Sequence[ColumnElement[Any]]:  # Any: as in `_KEY`
    local, _, rest = cursor.partition(" ")
    direction, _, remote = rest.partition(" ")
    if direction not in [*FollowDirection] or not remote:
        raise CursorError
    values = (local, remote, FollowDirection(direction))
    return [bindparam(None, value, type_=key.type) for key, value in zip(_KEY, values, strict=True)]


_KEY: Final[Sequence[ColumnElement[Any]]] = tuple(  # Any: columns of any type
    getattr(ActivityFollow, name) for name in ("local_actor", "remote_actor", "direction")
)
_COLUMNS: Final = tuple(
    getattr(ActivityFollow, name)
    for name in (
        *("local_actor", "remote_actor", "direction", "state", "since"),
        *("inbox", "shared_inbox", "follow_id"),
    )
)
