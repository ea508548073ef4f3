"""The rows of what users do: a follow, an unfollow or a post, and the deliveries that tell of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

from pydantic import JsonValue
from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session
from sqlmodel import col

from db import Follow, Post, User, new_id
from federation.base.queues.job_data import FOLLOW_JOB, POST_JOB, UNFOLLOW_JOB
from federation.delivery.outbox.insert import Owing, Planned
from federation.delivery.outbox.ordering import cancelled_unsent
from federation.protocol.activities import PostActivity, follow_activity, post_activity, unfollow_activity
from federation.protocol.models import parse_model
from federation.protocol.urls import canonical_origin, peer_registry_url
from federation.sealed.peers.follow_news import Direction, Pair, time_to_tell
from workers.clock import Clock

FOLLOWS_PATH: Final = "/api/auth/social/follows"
POSTS_PATH: Final = "/api/auth/social/posts"

Content: TypeAlias = Sequence[Mapping[str, JsonValue]]
Plan: TypeAlias = Callable[[Session, Planned], None]
"""Adds the jobs of what was written into the session's transaction."""


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
    owing: Owing
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
        self.owing.enter(session)
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
        planned = self.owing.delivery(
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
        self.owing.enter(session)
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
        planned = self.owing.delivery(session, UNFOLLOW_JOB, server_url + FOLLOWS_PATH, server_url, payload, key)
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
        self.owing.enter(session)
        session.add(post)
        planned = self.owing.fanout(session, POST_JOB, POSTS_PATH, self._audience(session, author_id), payload)
        if planned is not None:
            plan(session, planned)
        return PublishedPost(post_id=post.id, delivery_ids=() if planned is None else planned.owed)

    def _audience(self, session: Session, author_id: str) -> list[str]:
        chosen = select(col(User.post_propagation_policy)).where(col(User.id) == author_id)
        policy = session.execute(chosen).scalar_one_or_none()
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
