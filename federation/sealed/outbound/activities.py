"""What users do that other servers must hear of: follow, unfollow, post; with their rows and deliveries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, TypeAlias

from pydantic import JsonValue
from sqlalchemy import delete, func, or_, select
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlmodel import col

from db import Database, Follow, Post, User, new_id
from db.errors import is_outage
from federation.base.errors import ConfigurationError
from federation.base.queues.job_data import FOLLOW_JOB, POST_JOB, UNFOLLOW_JOB
from federation.base.settings.reach import HOST_ADVICE
from federation.delivery.outbox.insert import OutboxInserter, Planned
from federation.delivery.outbox.ordering import cancelled_unsent
from federation.delivery.outbox.outbox import Outbox
from federation.protocol.activities import PostActivity, follow_activity, post_activity, unfollow_activity
from federation.protocol.encodings import parse_model
from federation.protocol.urls import canonical_origin, peer_registry_url
from federation.sealed.peers.discovery import Discovery, Shown
from federation.sealed.peers.follow_news import Direction, Pair, time_to_tell
from federation.sealed.peers.registry import Registry
from workers.clock import Clock, SystemClock

FOLLOWS_PATH: Final = "/api/auth/social/follows"
POSTS_PATH: Final = "/api/auth/social/posts"

Content: TypeAlias = Sequence[Mapping[str, JsonValue]]
EXAMPLE: Final = '[{"type": "text", "value": "hello"}]'
Plan: TypeAlias = Callable[[Session, Planned], None]
"""Adds the jobs of what was written into the session's transaction."""


class UnknownUser(ValueError):
    """This node has no such user."""

    def __init__(self, user_id: str) -> None:
        super().__init__(f"there is no user {user_id!r} here; `federation users list` shows who is")


def policy_of(session: Session, user_id: str) -> str | None:
    """Return to which servers the local user's posts go. What the session is yet to write counts, too.

    Raises:
        UnknownUser: this node has no such user.
        ConfigurationError: it has no table of users, or not the columns that are read.
    """
    session.flush()
    chosen = select(col(User.post_propagation_policy)).where(col(User.id) == user_id)
    try:
        found = session.execute(chosen).one_or_none()
    except (OperationalError, ProgrammingError) as error:
        if is_outage(error):
            raise
        why = type(error.orig).__name__
        raise ConfigurationError([f"the table user cannot be read ({why}): {HOST_ADVICE}"]) from error
    if found is None:
        raise UnknownUser(user_id)
    return found[0]


async def is_stored(database: Database, user_id: str) -> bool:
    """Tell whether the user is in the database, without the transaction of a caller who may have just made it.

    On SQLite that would have the only write lock from then on, also while a stranger's server is asked something.

    Raises:
        ConfigurationError: as `policy_of`.
    """
    async with database.read() as session:
        try:
            await session.run_sync(policy_of, user_id)
        except UnknownUser:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedFollow:
    """A new follow and the delivery that asks for it."""

    follow_id: str
    delivery_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPost:
    """A stored post and one delivery for each server that is to have it."""

    post_id: str
    delivery_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """Writes activities in this node's name and the deliveries that they require, by statements alone.

    See `Producers`.
    """

    own_url: str
    inserter: OutboxInserter
    clock: Clock

    def follow(
        self,
        session: Session,
        *,
        plan: Plan,
        follower_id: str,
        following_id: str,
        server_url: str,
        requester_signature: str | None = None,
    ) -> RequestedFollow:
        """Write the rows of `Producers.request_follow`; the server is registered, and given by its canonical name."""
        self.inserter.enter(session)
        follow_id = new_id()
        pair = _told(server_url, follower_id, following_id)
        now = time_to_tell(session, pair, follow_id=follow_id, now=self.clock.now(), after=None)
        follow = Follow(
            id=follow_id,
            follower_id=follower_id,
            following_id=following_id,
            created_at=now,
            # The followed side's server: the acknowledgment is matched by it. See `Follow`.
            follower_server_url=server_url,
            requester_signature=requester_signature,
        )
        session.add(follow)
        payload = follow_activity(
            federation_url=self.own_url,
            follow_id=follow.id,
            created_at=now,
            follower_id=follower_id,
            following_id=following_id,
            follower_server_url=server_url,
            requester_signature=requester_signature,
        )
        planned = self.inserter.delivery(
            session,
            FOLLOW_JOB,
            server_url + FOLLOWS_PATH,
            server_url,
            payload,
            _follow_key(follower_id, following_id),
        )
        plan(session, planned)
        return RequestedFollow(follow_id=follow.id, delivery_id=planned.owed[0])

    def unfollow(
        self, session: Session, *, plan: Plan, follower_id: str, following_id: str, server_url: str
    ) -> str | None:
        """Write the rows of `Producers.request_unfollow`."""
        server_url = canonical_origin(server_url)
        removed = (
            delete(Follow)
            .where(
                col(Follow.follower_id) == follower_id,
                col(Follow.following_id) == following_id,
                col(Follow.follower_server_url) == server_url,
            )
            .returning(col(Follow.created_at), col(Follow.id))
        )
        self.inserter.enter(session)
        rows = session.execute(removed).all()
        if not rows:
            return None
        key = _follow_key(follower_id, following_id)
        if cancelled_unsent(session, server_url, key, FOLLOW_JOB):
            return None
        followed_at, follow_id = max((row.created_at, row.id) for row in rows)
        pair = _told(server_url, follower_id, following_id)
        payload = unfollow_activity(
            federation_url=self.own_url,
            follower_id=follower_id,
            following_id=following_id,
            follow_id=follow_id,
            ended_at=time_to_tell(session, pair, follow_id=follow_id, now=self.clock.now(), after=followed_at),
        )
        planned = self.inserter.delivery(session, UNFOLLOW_JOB, server_url + FOLLOWS_PATH, server_url, payload, key)
        plan(session, planned)
        return planned.owed[0]

    def post(
        self,
        session: Session,
        *,
        plan: Plan,
        author_id: str,
        content: Content,
        published: datetime | None = None,
        is_private: bool | None = None,
        post_id: str | None = None,
        author_signature: str | None = None,
    ) -> PublishedPost:
        """Write the rows of `Producers.publish_post`."""
        if not isinstance(content, Sequence) or not all(isinstance(block, Mapping) for block in content):
            raise ValueError(f"the content of a post must be a list of blocks, each a dict: {EXAMPLE}")
        if not content:
            raise ValueError(f"the content of a post must have at least one block: {EXAMPLE}")
        now = self.clock.now()
        post = Post(
            id=post_id or new_id(),
            content=[dict(block) for block in content],
            author_id=author_id,
            published=published or now,
            is_local=True,
            is_private=bool(is_private),
            created_at=now,
            author_signature=author_signature,
        )
        payload = post_activity(
            federation_url=self.own_url,
            post_id=post.id,
            content=content,
            author_id=author_id,
            published=post.published,
            is_private=is_private,
        )
        parse_model(PostActivity, payload)
        self.inserter.enter(session)
        audience = self._audience(session, author_id)
        session.add(post)
        planned = self.inserter.fanout(session, POST_JOB, POSTS_PATH, audience, payload)
        if planned is not None:
            plan(session, planned)
        return PublishedPost(post_id=post.id, delivery_ids=() if planned is None else planned.owed)

    def _audience(self, session: Session, author_id: str) -> list[str]:
        policy = policy_of(session, author_id)
        if policy == "none":
            return []
        is_followed = col(Follow.following_id) == author_id
        named = is_followed if policy == "followers" else or_(is_followed, col(Follow.follower_id) == author_id)
        # Either column may hold the other party's server, depending on which side wrote the row.
        server = func.coalesce(col(Follow.follower_server_url), col(Follow.following_server_url))
        query = select(server).where(named, col(Follow.accepted).is_(True), server.is_not(None)).distinct()
        servers = (peer_registry_url(url, self.own_url) for url in session.execute(query).scalars())
        return sorted({server for server in servers if server is not None})


def _told(server_url: str, follower_id: str, following_id: str) -> Pair:
    return Pair(direction=Direction.TOLD, server_url=server_url, follower_id=follower_id, following_id=following_id)


def _follow_key(follower_id: str, following_id: str) -> str:
    """Return the ordering key that a pair's follows and unfollows share, so that none overtakes another.

    The ids may be of any length, so the key is a hash of them.
    """
    return "follow " + hashlib.sha256(f"{len(follower_id)} {follower_id} {following_id}".encode()).hexdigest()


__all__ = ["Content", "Producers", "PublishedPost", "RequestedFollow", "ServerRefused", "UnknownUser"]


class ServerRefused(Exception):
    """The other server is blacklisted here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A server that may be followed, and what it shows of itself, which is None if it is registered here."""

    server_url: str
    shown: Shown | None


class Producers:
    """Builds activities in this node's name and owes their delivery, all in the caller's transaction."""

    def __init__(
        self,
        *,
        own_url: str,
        outbox: Outbox,
        registry: Registry,
        discovery: Discovery,
        clock: Clock | None = None,
    ) -> None:
        self._own_url = own_url
        self._outbox = outbox
        self._registry = registry
        self._discovery = discovery
        self.produced = Produced(own_url=own_url, inserter=outbox.inserter, clock=clock or SystemClock())

    async def request_follow(
        self,
        session: AsyncSession,
        *,
        follower_id: str,
        following_id: str,
        server_url: str,
        requester_signature: str | None = None,
    ) -> RequestedFollow:
        """Store the local user's follow of a user on `server_url` as pending, and owe its request.

        An unknown server is discovered first, over the network: call this before the session's other writes.

        Raises:
            UnknownUser: the follower is no user of this node. No server is asked, and nothing is written then.
            ServerRefused: the server is blacklisted.
            DiscoveryError: it is unknown and could not be discovered.
            ConfigurationError: this node has no table of users.
            BlockedUrl, ValueError: its URL is not acceptable.
        """
        self._outbox.check_kind(session, "request_follow")
        if not await self.has_user(follower_id):
            await self._outbox.within(session, partial(self.require_user, user_id=follower_id), "request_follow")
        met = await self.meet(server_url)

        def owe(inside: Session) -> RequestedFollow:
            return self.follow(
                inside,
                self._outbox.plan,
                met,
                follower_id=follower_id,
                following_id=following_id,
                requester_signature=requester_signature,
            )

        return await self._outbox.within(session, owe, "request_follow")

    async def request_unfollow(
        self, session: AsyncSession, *, follower_id: str, following_id: str, server_url: str
    ) -> str | None:
        """Remove the local user's follow, owe the news of it to the other server, and return the delivery's id.

        Returns None if there is nothing to send: there was no such follow, or its own request was never tried and is
        cancelled now. Otherwise the server hears of the unfollow after the follow, never before.
        """

        def owe(inside: Session) -> str | None:
            return self.produced.unfollow(
                inside,
                plan=self._outbox.plan,
                follower_id=follower_id,
                following_id=following_id,
                server_url=server_url,
            )

        return await self._outbox.within(session, owe, "request_unfollow")

    async def publish_post(
        self,
        session: AsyncSession,
        *,
        author_id: str,
        content: Content,
        published: datetime | None = None,
        is_private: bool | None = None,
        post_id: str | None = None,
        author_signature: str | None = None,
    ) -> PublishedPost:
        """Store the local user's post, and owe a delivery to every server that is to have it.

        Those are the servers of accepted follows that name the author on either side. With the author's policy
        `followers` only the servers of those who follow the author get it; with `none`, no server does.

        Raises:
            UnknownUser: the author is no user of this node. Nothing is written then.
            ValueError: receivers would refuse it: it has no content, or a block lacks what its type requires.
        """

        def owe(inside: Session) -> PublishedPost:
            return self.produced.post(
                inside,
                plan=self._outbox.plan,
                author_id=author_id,
                content=content,
                published=published,
                is_private=is_private,
                post_id=post_id,
                author_signature=author_signature,
            )

        return await self._outbox.within(session, owe, "publish_post")

    async def has_user(self, user_id: str) -> bool:
        """Tell whether this node has the user, but for one whom the caller's transaction has just made."""
        return await is_stored(self._registry.database, user_id)

    def require_user(self, session: Session, user_id: str) -> None:
        """Check that this node has the user, in the caller's transaction.

        Raises:
            UnknownUser, ConfigurationError: see `policy_of`.
        """
        self._outbox.inserter.enter(session)
        policy_of(session, user_id)

    async def meet(self, server_url: str) -> Met:
        """Prepare a follow of somebody on that server.

        A registered server needs nothing; of any other, read what it shows at its `/discover`.

        Raises:
            ServerRefused, DiscoveryError, BlockedUrl, ValueError: as `request_follow`.
        """
        server_url = canonical_origin(server_url)
        if server_url == self._own_url:
            raise ValueError(f"{server_url} is this node: a follow between its own users needs no delivery")
        standing = await self._registry.standing(server_url)
        if standing.blacklisted:
            raise ServerRefused(f"{server_url} is blacklisted")
        if standing.server is not None:
            return Met(server_url=server_url, shown=None)
        return Met(server_url=server_url, shown=await self._discovery.meet(server_url))

    def follow(
        self,
        session: Session,
        plan: Plan,
        met: Met,
        *,
        follower_id: str,
        following_id: str,
        requester_signature: str | None,
    ) -> RequestedFollow:
        """Write the follow's rows, and register the server if that is still to be done.

        Raises:
            UnknownUser: the follower is no user of this node.
            DiscoveryError: another server is registered with one of its keys.
        """
        self.require_user(session, follower_id)
        if met.shown is not None:
            self._discovery.register_within(session, met.server_url, met.shown)
        return self.produced.follow(
            session,
            plan=plan,
            follower_id=follower_id,
            following_id=following_id,
            server_url=met.server_url,
            requester_signature=requester_signature,
        )
