"""`POST /api/auth/social/follows`: a remote user follows a local one, or stops following.

Theory of operation. One transaction checks and stores, one at a time for each (server, follower, followed). So a
delivery that is repeated, even at the same moment, finds the first one's row and is acknowledged with that row's state.
A later accept or reject by the followed user changes only our row: peers know no message for it, and learn of it at
best when they ask again.

A message older than the newest that its server sent about the pair was repeated, by anybody: it is acknowledged for
what it is, and changes nothing. See `federation.sealed.peers.follow_news`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import structlog
from sqlalchemy import ColumnElement, delete, exists, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, aliased
from sqlmodel import col
from starlette.responses import Response

from db import Block, Database, Follow, User, one_at_a_time
from federation.node.front import Inbound
from federation.node.inbox import Inbox, Received, unknown_server
from federation.node.refusals import FrameworkRefusal, Refusal
from federation.protocol.acks import follow_ack
from federation.protocol.activities import (
    ActivityMethod,
    EndedFollowing,
    FollowActivity,
    Following,
    UnfollowActivity,
    unfollow_activity,
)
from federation.protocol.encodings import EPOCH
from federation.sealed.peers.follow_news import Direction, Pair, take_follow, take_unfollow
from federation.sealed.peers.registry import KnownServer, Registry

log = structlog.get_logger(__name__)

USER_BLOCKED: Final = "USER_BLOCKED"
"""Why a follow is refused. Senders through a relay get it as a code; for others it is only in our log."""
FOLLOWS_PATH: Final = "/api/auth/social/follows"
FOLLOW_MODELS: Final[Mapping[ActivityMethod, type[FollowActivity | UnfollowActivity]]] = {
    ActivityMethod.FEDERATE: FollowActivity,
    ActivityMethod.UNFOLLOW: UnfollowActivity,
}


class FollowsInbox:
    """Callable with a request to the follows endpoint."""

    def __init__(self, *, inbox: Inbox, database: Database, registry: Registry) -> None:
        self._inbox = inbox
        self._database = database
        self._registry = registry

    async def __call__(self, inbound: Inbound) -> Response:
        """Store or remove the follow, and acknowledge it, as every repeat is acknowledged, too.

        Raises:
            Refusal: nothing was changed.
        """
        return await self.apply(await self._inbox.open(inbound, FOLLOW_MODELS, _malformed))

    async def apply(self, received: Received[FollowActivity | UnfollowActivity], *, relayed: bool = False) -> Response:
        """Do the same for an activity that was opened already. A `relayed` follow is filed in another column.

        Raises:
            Refusal: nothing was changed.
        """
        if isinstance(received.activity, UnfollowActivity):
            return await self._unfollow(received, received.activity.following)
        return await self._follow(received, received.activity.following, relayed=relayed)

    async def _follow(
        self, received: Received[FollowActivity | UnfollowActivity], following: Following, *, relayed: bool
    ) -> Response:
        sender = received.sender
        try:
            async with self._database.transaction() as session:
                await one_at_a_time(session, "follow", sender.url, following.follower_id, following.following_id)
                is_private = await _followed_privacy(session, following)
                is_news = await session.run_sync(_is_news, sender, following)
                row = await _existing(session, sender, following)
                event = "follow_replayed" if row is not None else "follow_received" if is_news else "follow_outdated"
                if row is None and is_news:
                    row = _new_row(sender, following, accepted=not is_private, relayed=relayed)
                    session.add(row)
                # An ended follow has no row: it is acknowledged by its own id, as a follow that was not accepted.
                row = row or _ended_row(sender, following)
                acknowledgment = self._inbox.acknowledge(received, _follow_ack(sender, row), accepted=row.accepted)
        except IntegrityError:
            # The row refers to the registry, and the server was deleted from it since it was looked up.
            self._registry.forget(sender.url)
            raise unknown_server() from None
        log.info(event, server_url=sender.url, follow_id=row.id, accepted=row.accepted)
        return acknowledgment

    async def _unfollow(
        self, received: Received[FollowActivity | UnfollowActivity], following: EndedFollowing
    ) -> Response:
        sender = received.sender
        # A peer may not delete the rows of a local follower, although they name that peer, too.
        is_local = exists().where(col(User.id) == col(Follow.follower_id))
        rows = delete(Follow).where(*_same_follow(sender, following), ~is_local).returning(col(Follow.id))
        # Echoes the unfollow with the sender's name in it: although we sign it, nobody can take it for an activity of
        # ours.
        plaintext = unfollow_activity(
            federation_url=sender.url,
            follower_id=following.follower_id,
            following_id=following.following_id,
            follow_id=following.id,
            ended_at=following.created_at,
        )
        acknowledgment = self._inbox.acknowledge(received, plaintext)
        async with self._database.transaction() as session:
            await one_at_a_time(session, "follow", sender.url, following.follower_id, following.following_id)
            is_news = await session.run_sync(_is_news, sender, following)
            removed = len((await session.execute(rows)).all()) if is_news else 0
        event = "unfollow_received" if is_news else "unfollow_outdated"
        log.info(event, server_url=sender.url, removed=removed)
        return acknowledgment


def _is_news(session: Session, sender: KnownServer, following: Following | EndedFollowing) -> bool:
    """Tell whether nothing newer was heard of the follow.

    One without a time counts as new: earlier versions send such ends.
    """
    told_at = following.created_at
    if told_at is None or told_at == EPOCH:
        return True
    pair, now = _heard(sender, following), datetime.now(UTC)
    if isinstance(following, EndedFollowing):
        return take_unfollow(session, pair, follow_id=following.id, told_at=told_at, now=now)
    return take_follow(session, pair, follow_id=following.id, told_at=told_at, now=now)


def _heard(sender: KnownServer, following: Following | EndedFollowing) -> Pair:
    return Pair(
        direction=Direction.HEARD,
        server_url=sender.url,
        follower_id=following.follower_id,
        following_id=following.following_id,
    )


def _malformed(where: str, problem: str) -> Refusal:
    return FrameworkRefusal(400, f"[{where}] {problem}", code="VALIDATION_ERROR")


async def _followed_privacy(session: AsyncSession, following: Following) -> bool:
    """Return whether the followed user is private.

    Raises:
        Refusal: there is no such user here; they blocked the follower; or the follower's id is a local user's, who
            would then seem to follow (user ids of all servers share one namespace in the tables).
    """
    local_follower = aliased(User)
    is_blocked = exists().where(
        col(Block.blocker_id) == following.following_id, col(Block.blocked_user_id) == following.follower_id
    )
    is_local = exists().where(col(local_follower.id) == following.follower_id)
    query = select(col(User.is_private), is_blocked, is_local).where(col(User.id) == following.following_id)
    user = (await session.execute(query)).one_or_none()
    if user is None:
        raise Refusal(404, "The followed user does not exist here", code="USER_NOT_FOUND")
    private, blocked, local = user
    if blocked:
        raise Refusal(403, "The followed user has blocked the follower", reason=USER_BLOCKED)
    if local:
        raise Refusal(403, "The follower is a user of this server, not of the sending one", reason="FOLLOWER_IS_LOCAL")
    return bool(private)


async def _existing(session: AsyncSession, sender: KnownServer, following: Following) -> Follow | None:
    # Nodes that stored every repeat left several rows behind; if one was accepted, the follow is.
    best_first = col(Follow.accepted).desc(), col(Follow.created_at)
    query = select(Follow).where(*_same_follow(sender, following)).order_by(*best_first).limit(1)
    row: Follow | None = (await session.execute(query)).scalar_one_or_none()
    return row


def _same_follow(sender: KnownServer, following: Following | EndedFollowing) -> tuple[ColumnElement[bool], ...]:
    # A follow that came through a relay has its server in the other column.
    server = func.coalesce(col(Follow.follower_server_url), col(Follow.following_server_url))
    return (
        col(Follow.follower_id) == following.follower_id,
        col(Follow.following_id) == following.following_id,
        server == sender.url,
    )


def _ended_row(sender: KnownServer, following: Following) -> Follow:
    """Build a row that serves an acknowledgment only, and is never stored."""
    row = _new_row(sender, following, accepted=False, relayed=False)
    row.id, row.created_at = following.id, following.created_at
    return row


def _follow_ack(sender: KnownServer, row: Follow) -> str:
    return follow_ack(
        sender_url=sender.url,
        follow_id=row.id,
        created_at=row.created_at,
        follower_id=row.follower_id,
        following_id=row.following_id,
        accepted=row.accepted,
    )


def _new_row(sender: KnownServer, following: Following, *, accepted: bool, relayed: bool) -> Follow:
    # Nodes that share these tables tell direct and relayed follows apart by the column, and expect both values.
    return Follow(
        follower_id=following.follower_id,
        following_id=following.following_id,
        follower_server_url=sender.url if relayed else None,
        following_server_url=None if relayed else sender.url,
        accepted=accepted,
        acknowledged=relayed,
        created_at=datetime.now(UTC),
    )
