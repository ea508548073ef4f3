"""Who follows whom, between actors of this node and those of others.

Theory of operation. A row stands for a pair and a direction. What others send changes it in the transaction that ends
their activity, and what we answer is owed in the same one. A Follow is answered to inboxes on its actor's own origin
alone, which are asked for before the transaction. Only the actor that has signed may end what it began, or answer what
it was asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from enum import Enum
from functools import cache, partial
from heapq import heappop, heappush
from typing import Any, Final

from sqlalchemy import Executable, Row, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from db import ActivityActor, ActivityFollow, Database, FollowDirection, FollowState, new_timed_id
from federation.activitypub import activities, documents
from federation.activitypub.handlers import (
    FollowDecision,
    Handlers,
    IncomingActivity,
    NotTried,
    call,
    id_of,
    one_of,
    types_of,
)
from federation.activitypub.inboxes import Inboxes
from federation.activitypub.outbound import Recipient, Senders
from federation.activitypub.remote_actors import RemoteActors, recipient_in
from federation.activitypub.undone import remember, was_undone
from federation.base.cache import LoadingCache
from federation.delivery.outbox.outbox import Outbox
from federation.protocol.urls import origin_of
from federation.servers.blacklist import Blacklist
from workers.clock import Clock, monotonic


class Followers(Enum):
    """Stands for all whose follow of the activity's actor was accepted, in place of recipients."""

    FOLLOWERS = "followers"


FOLLOWERS: Final = Followers.FOLLOWERS

OWN_TYPES: Final = frozenset({"Follow", "Undo", "Accept", "Reject", "Delete"})
COUNTED_FOR: Final = timedelta(minutes=1)
MOST_PER_ORIGIN: Final = 2
MOST_AT_ONCE: Final = 4
"""Each takes a slot of tasks, of which there are ten by default: strangers cannot take all by servers that hang."""
BUSY: Final = timedelta(seconds=5)
"""How long a Follow waits whose server is asked about so many; the more of them wait, the longer each does."""
LONGEST_BUSY: Final = timedelta(minutes=5)
MOST_BACK: Final = 50
"""How many of them come back within that time, or their jobs would take the turns of all others."""

_STATES: Final = {
    FollowDecision.ACCEPT: FollowState.ACCEPTED,
    FollowDecision.REJECT: FollowState.REJECTED,
    FollowDecision.PENDING: FollowState.PENDING,
}


class FollowHandlers:
    """What this node does with Follow, Accept, the Undo of either, Reject, Block, and Update and Delete of an actor."""

    def __init__(
        self,
        *,
        database: Database,
        outbox: Outbox,
        senders: Senders,
        blacklist: Blacklist,
        remote: RemoteActors,
        inboxes: Inboxes,
        handlers: Handlers,
        clock: Clock,
    ) -> None:
        self._database = database
        self._outbox = outbox
        self._senders = senders
        self._blacklist = blacklist
        self._remote = remote
        self._inboxes = inboxes
        self._handlers = handlers
        self._clock = clock
        self._asking: Counter[str] = Counter()  # requests under way, by origin
        self._put_off: list[float] = []  # a heap: when those come back that found too many under way

    async def prepare(self, activity: IncomingActivity) -> Recipient | None:
        """Return who wants to follow an actor of ours, or has changed, and his inboxes; None if nobody can be sent to.

        Whoever sends something is reached again, too, unless it is the news of his end.

        Raises:
            ActorUnavailable, NetworkError: its server does not show it now.
            NotTried: its server is being asked about others.
        """
        shown = await (self._changed(activity) if _changes_its_actor(activity) else self._follower(activity))
        if not _ends_its_actor(activity):
            await self._inboxes.heard_of(activity.actor, *([] if shown is None else [shown.inbox]))
        return shown

    async def _follower(self, activity: IncomingActivity) -> Recipient | None:
        followed = _url_of(activity.object)
        if "Follow" not in activity.types or activity.id is None or followed is None:
            return None
        if not await self._database.rows(_OURS, {"actor": followed}):
            return None
        return self._reached(await self._shown(activity.actor))

    async def _changed(self, activity: IncomingActivity) -> Recipient | None:
        """Return the actor as the Update shows him, or as his server does if that has his URL alone."""
        if not await self._database.rows(_KNOWN, {"remote": activity.actor}):
            return None
        thing = activity.object
        is_told = isinstance(thing, Mapping) and "inbox" in thing
        return self._reached(recipient_in(thing, activity.actor) if is_told else await self._shown(activity.actor))

    def _reached(self, recipient: Recipient | None) -> Recipient | None:
        """Return a recipient with the inboxes that can be sent to; None if his own cannot."""
        if recipient is None:
            return None
        alone = replace(recipient, shared_inbox=None)
        return next((each for each in (recipient, alone) if self._senders.can_reach(each)), None)

    async def _shown(self, actor: str) -> Recipient | None:
        """Ask the actor's server, but for one that is asked about enough of its actors, or if enough others are."""
        origin = origin_of(actor)
        if self._asking[origin] >= MOST_PER_ORIGIN or self._asking.total() >= MOST_AT_ONCE:
            raise NotTried(self._pause(), reason="servers are being asked about other actors")
        self._asking[origin] += 1
        try:
            return await self._remote.recipient(actor)
        finally:
            self._asking[origin] -= 1
            self._asking += Counter()  # forgets those of whom there are none

    def _pause(self) -> timedelta:
        """Return how long a Follow waits that is put off now, by how many are."""
        now = monotonic()
        while self._put_off and self._put_off[0] <= now:
            heappop(self._put_off)
        pause = min(BUSY * max(1.0, len(self._put_off) / MOST_BACK), LONGEST_BUSY)
        heappush(self._put_off, now + pause.total_seconds())
        return pause

    def is_for(self, activity: IncomingActivity) -> bool:
        """Tell whether this says all that there is to do with an activity of such a type, if no function is for it."""
        return not OWN_TYPES.isdisjoint(activity.types)

    async def handle(self, session: AsyncSession, activity: IncomingActivity, prepared: object) -> bool:
        """Change the follows that the activity is about. Return False for a Follow that was undone before it came."""
        follow_id, now = activity.id if "Follow" in activity.types else None, self._clock.now()
        if follow_id is not None and await session.run_sync(was_undone, activity.actor, follow_id, now):
            return False
        if isinstance(prepared, Recipient) and _changes_its_actor(activity):
            inboxes = {"new_inbox": prepared.inbox, "new_shared_inbox": prepared.shared_inbox}
            await session.execute(_MOVED, {"remote": prepared.id, **inboxes})
        elif isinstance(prepared, Recipient):
            await self._asked(session, activity, prepared)
        if "Undo" in activity.types:
            await session.run_sync(_undone, activity, now)
        for name, state in (("Accept", FollowState.ACCEPTED), ("Reject", FollowState.REJECTED)):
            if name in activity.types:
                await session.run_sync(_told, activity.actor, activity.object, state, now)
        if "Block" in activity.types:
            following = {"type": "Follow", "actor": activity.object}
            await session.run_sync(_told, activity.actor, following, FollowState.REJECTED, now)
        if _ends_its_actor(activity):
            await session.execute(_ENDED, {"remote": activity.actor})
        return True

    async def _asked(self, session: AsyncSession, activity: IncomingActivity, follower: Recipient) -> None:
        """Note that somebody wants to follow, and answer. Who may follow already is told so again."""
        assert activity.object_id is not None
        was_accepted = await session.run_sync(_noted, activity, follower, self._clock.now())
        answer = FollowDecision.ACCEPT
        if not was_accepted and (decides := self._handlers.decides_follows) is not None:
            answer = FollowDecision(str(await call(decides, session, activity)))
        work = partial(answered, local=activity.object_id, remote=follower.id, answer=answer, now=self._clock.now())
        owed = await session.run_sync(work)
        if owed is not None:
            await self._send(session, *owed)

    async def _send(self, session: AsyncSession, activity: Mapping[str, object], recipient: Recipient) -> None:
        addressed = self._senders.addressed(activity, [recipient], prefer_shared_inbox=False)
        blacklisted = await self._blacklist.covered({*addressed.servers.values()})
        work = partial(self._senders.send, addressed=addressed, blacklisted=blacklisted, plan=self._outbox.plan)
        await session.run_sync(work)


def _ends_its_actor(activity: IncomingActivity) -> bool:
    return "Delete" in activity.types and activity.object_id == activity.actor


def _changes_its_actor(activity: IncomingActivity) -> bool:
    return "Update" in activity.types and activity.object_id == activity.actor


def followers_of(session: Session, actor: str) -> list[Recipient]:
    """Return all whose follow of an actor of ours was accepted."""
    rows = session.execute(_FOLLOWERS, {"local": actor})
    return [Recipient(id=row.remote_actor, inbox=row.inbox, shared_inbox=row.shared_inbox) for row in rows]


class FollowTotals:
    """Counts who follows actors of ours, and whom they follow, for strangers who ask: once a minute. Close it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counts: LoadingCache[int] = LoadingCache(self._count, ttl=COUNTED_FOR)

    async def count(self, actor: str, collection: str) -> int:
        """Return how many were accepted: `followers` of an actor, or those in `following`.

        Raises:
            SQLAlchemyError: the database failed.
        """
        return await self._counts.get(f"{collection} {actor}")

    async def close(self) -> None:
        """Stop reading."""
        await self._counts.close()

    async def _count(self, key: str) -> int:
        collection, _, actor = key.partition(" ")
        way = FollowDirection.FOLLOWER if collection == documents.FOLLOWERS else FollowDirection.FOLLOWING
        total: int = (await self._database.rows(_TOTAL, {"local": actor, "way": way}))[0][0]
        return total


def follow(local: str, remote: str) -> dict[str, Any]:
    """Make the Follow of an actor of another server by one of ours."""
    return activities.follow(local, remote, activity_id=f"{local}#follows/{new_timed_id()}")


def followed(session: Session, *, following: Mapping[str, Any], remote: Recipient, now: datetime) -> None:
    """Note that an actor of ours has sent this Follow. One that was accepted stays so."""
    _put(session, following["actor"], remote, FollowDirection.FOLLOWING, following["id"], now)


def unfollow(session: Session, *, local: str, remote: str) -> tuple[dict[str, Any], Recipient] | None:
    """End a follow of ours. Return its Undo, and who is to get that; None if there is no such follow."""
    pair = {"local": local, "remote": remote, "way": FollowDirection.FOLLOWING}
    row = session.execute(_PAIR, pair).one_or_none()
    if row is None:
        return None
    session.execute(_REMOVED, pair)
    return activities.undo(activities.follow(local, remote, activity_id=row.follow_id)), _recipient(row)


def answered(
    session: Session, *, local: str, remote: str, answer: FollowDecision, now: datetime
) -> tuple[dict[str, Any], Recipient] | None:
    """Note what an actor of ours says to a follower. Return what is to be sent, and to whom; None if that is nothing.

    Raises:
        ValueError: the other has not asked.
    """
    pair = {"local": local, "remote": remote, "way": FollowDirection.FOLLOWER}
    row = session.execute(_PAIR, pair).one_or_none()
    if row is None:
        raise ValueError(f"{remote[:200]} does not want to follow {local[:200]}")
    if row.state is not _STATES[answer]:
        session.execute(_SAID, {**pair, "into": _STATES[answer], "at": now})
    if answer is FollowDecision.PENDING:
        return None
    asked = activities.follow(remote, local, activity_id=row.follow_id)
    del asked["to"]
    # Each has an id of its own: many servers, such as Lemmy and Pleroma, take no activity twice, and an actor may have
    # been rejected between, or follow again by a Follow of the same name.
    if answer is FollowDecision.ACCEPT:
        made = activities.accept(asked, activity_id=f"{local}#accepts/{new_timed_id()}")
    else:
        made = activities.reject(asked, activity_id=f"{local}#rejects/{new_timed_id()}")
    return made, _recipient(row)


def _noted(session: Session, activity: IncomingActivity, follower: Recipient, now: datetime) -> bool:
    """Note who wants to follow, by this activity from now on. Return whether that is so already."""
    assert activity.object_id is not None
    assert activity.id is not None
    return _put(session, activity.object_id, follower, FollowDirection.FOLLOWER, activity.id, now)


def _put(
    session: Session, local: str, remote: Recipient, direction: FollowDirection, follow_id: str, now: datetime
) -> bool:
    """Make the row of a pair, or give it this Follow. Return whether it was accepted, which it stays."""
    pair = {"local": local, "remote": remote.id, "way": direction}
    known = session.execute(_PAIR, pair).one_or_none()
    asked = {"inbox": remote.inbox, "shared_inbox": remote.shared_inbox, "follow_id": follow_id}
    if known is None:
        names = {"local_actor": local, "remote_actor": remote.id, "direction": direction}
        new = {**names, **asked, "state": FollowState.PENDING, "since": now}
        session.execute(_made(session.get_bind().dialect.name), new)
        known = session.execute(_PAIR, pair).one()  # somebody else may have made it, and said something, since the look
    was_accepted: bool = known.state is FollowState.ACCEPTED
    state = FollowState.ACCEPTED if was_accepted else FollowState.PENDING
    session.execute(_RENEWED, {**pair, **{f"new_{name}": value for name, value in asked.items()}, "into": state})
    return was_accepted


def _undone(session: Session, activity: IncomingActivity, now: datetime) -> None:
    """Remove the follow that its own actor undoes, or take back what the other has accepted."""
    thing = activity.object
    if isinstance(thing, Mapping) and "Accept" in types_of(thing):
        _told(session, activity.actor, one_of(thing.get("object")), FollowState.PENDING, now)
        return
    if isinstance(thing, Mapping) and (types := types_of(thing)) and "Follow" not in types:
        return
    local, follow_id = _our_end(thing, "object", actor=activity.actor, is_at="actor"), _url_of(thing)
    names, connection = {"remote": activity.actor, "way": FollowDirection.FOLLOWER}, session.connection()
    if local is not None:
        removed = connection.execute(_REMOVED, {**names, "local": local})
    elif follow_id is not None:
        removed = connection.execute(_REMOVED_BY_ID, {**names, "follow": follow_id})
    else:
        return
    if removed.rowcount == 0 and follow_id is not None:
        remember(session, activity.actor, follow_id, now)


def _told(session: Session, actor: str, thing: object, state: FollowState, now: datetime) -> None:
    """Note what the actor that was asked has said of a Follow of ours."""
    values = {"remote": actor, "into": state, "at": now, "from": _TOLD_OF[state]}
    local = _our_end(thing, "actor", actor=actor, is_at="object")
    if local is not None:
        session.execute(_TOLD, {**values, "local": local})
    elif (follow_id := _url_of(thing)) is not None:
        session.execute(_TOLD_BY_ID, {**values, "follow": follow_id})


_TOLD_OF: Final = {
    FollowState.ACCEPTED: [FollowState.PENDING],
    FollowState.REJECTED: [FollowState.PENDING, FollowState.ACCEPTED],
    FollowState.PENDING: [FollowState.ACCEPTED],
}
"""What a follow may have been before it is this: it may be rejected after it was accepted, or be asked again."""


def _our_end(thing: object, end: str, *, actor: str, is_at: str) -> str | None:
    """Return the actor of ours at that end of a Follow; None if it has only the id of that.

    At the other end is the actor who speaks of it; what else it says does not count.
    """
    if not isinstance(thing, Mapping) or "Follow" not in types_of(thing):
        return None
    return _url_of(one_of(thing.get(end))) if id_of(one_of(thing.get(is_at))) in (None, actor) else None


def _url_of(thing: object) -> str | None:
    """Return the URL of a thing, if we could have written it: PostgreSQL is not even asked for a text with a NUL."""
    url = id_of(thing)
    return url if url is not None and url.isprintable() else None


def _recipient(row: Row[*tuple[Any, ...]]) -> Recipient:
    return Recipient(id=row.remote_actor, inbox=row.inbox, shared_inbox=row.shared_inbox)


_TABLE: Final = ActivityFollow.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core skips the ORM
_ACTORS: Final = ActivityActor.__table__  # type: ignore[attr-defined] # as above
_KNOWN: Final = select(_TABLE.c.local_actor).where(_TABLE.c.remote_actor == bindparam("remote")).limit(1)
_OURS: Final = select(_ACTORS.c.id).where(_ACTORS.c.id == bindparam("actor"), _ACTORS.c.removed_at.is_(None))
_IS_PAIR: Final = (
    _TABLE.c.local_actor == bindparam("local"),
    _TABLE.c.remote_actor == bindparam("remote"),
    _TABLE.c.direction == bindparam("way"),
)
_IS_NAMED: Final = (_TABLE.c.remote_actor == bindparam("remote"), _TABLE.c.follow_id == bindparam("follow"))
_PAIR: Final = select(_TABLE).where(*_IS_PAIR).with_for_update()
"""Locked, as what is written next goes by what it says."""
_FOLLOWERS: Final = (
    select(_TABLE.c.remote_actor, _TABLE.c.inbox, _TABLE.c.shared_inbox)
    .where(
        _TABLE.c.local_actor == bindparam("local"),
        _TABLE.c.direction == FollowDirection.FOLLOWER,
        _TABLE.c.state == FollowState.ACCEPTED,
    )
    .order_by(_TABLE.c.remote_actor)
)
_TOTAL: Final = (
    select(func.count())
    .select_from(_TABLE)
    .where(
        _TABLE.c.local_actor == bindparam("local"),
        _TABLE.c.direction == bindparam("way"),
        _TABLE.c.state == FollowState.ACCEPTED,
    )
)
_REMOVED: Final = delete(_TABLE).where(*_IS_PAIR)
_REMOVED_BY_ID: Final = delete(_TABLE).where(*_IS_NAMED, _TABLE.c.direction == bindparam("way"))
_ENDED: Final = delete(_TABLE).where(_TABLE.c.remote_actor == bindparam("remote"))
_RENEWED: Final = (
    update(_TABLE)
    .where(*_IS_PAIR)
    .values(
        state=bindparam("into"), **{name: bindparam(f"new_{name}") for name in ("inbox", "shared_inbox", "follow_id")}
    )
)
_MOVED: Final = (
    update(_TABLE)
    .where(_TABLE.c.remote_actor == bindparam("remote"))
    .values(**{name: bindparam(f"new_{name}") for name in ("inbox", "shared_inbox")})
)
_SAID: Final = update(_TABLE).where(*_IS_PAIR).values(state=bindparam("into"), since=bindparam("at"))
_OWN_ASKED: Final = (
    _TABLE.c.direction == FollowDirection.FOLLOWING,
    _TABLE.c.state.in_(bindparam("from", expanding=True)),
)
_TOLD: Final = (
    update(_TABLE)
    .where(_TABLE.c.local_actor == bindparam("local"), _TABLE.c.remote_actor == bindparam("remote"), *_OWN_ASKED)
    .values(state=bindparam("into"), since=bindparam("at"))
)
_TOLD_BY_ID: Final = (
    update(_TABLE).where(*_IS_NAMED, *_OWN_ASKED).values(state=bindparam("into"), since=bindparam("at"))
)


@cache
def _made(dialect: str) -> Executable:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(_TABLE).on_conflict_do_nothing(index_elements=["local_actor", "remote_actor", "direction"])
