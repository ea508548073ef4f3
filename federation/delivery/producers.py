"""What users do that other servers must hear of: follow, unfollow, post."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

from pydantic import JsonValue
from sqlalchemy import delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import Follow, Post, User, new_id
from federation.base.jobs import FOLLOW_JOB, POST_JOB, UNFOLLOW_JOB
from federation.delivery.order import cancelled_unsent
from federation.delivery.outbox import Outbox
from federation.protocol.activities import PostActivity, follow_activity, post_activity, unfollow_activity
from federation.protocol.models import parse_model
from federation.protocol.urls import canonical_origin, peer_registry_url
from federation.servers.discovery import Discovery
from federation.servers.registry import Registry
from workers.clock import Clock, SystemClock

FOLLOWS_PATH: Final = "/api/auth/social/follows"
POSTS_PATH: Final = "/api/auth/social/posts"

Content: TypeAlias = Sequence[Mapping[str, JsonValue]]


class ServerRefused(Exception):
    """The other server is blacklisted here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedFollow:
    """A new follow and the delivery that asks for it."""

    follow_id: str
    delivery_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPost:
    """A stored post and one delivery per server that shall have it."""

    post_id: str
    delivery_ids: tuple[str, ...]


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
        self._clock = clock or SystemClock()

    async def request_follow(
        self,
        session: AsyncSession,
        *,
        follower_id: str,
        following_id: str,
        server_url: str,
        requester_signature: str | None = None,
    ) -> RequestedFollow:
        """The local user's follow of a user on `server_url` is stored, pending, and its request is owed.

        An unknown server is discovered first, over the network: call this before the session's other writes.

        Raises:
            ServerRefused: the server is blacklisted.
            DiscoveryError: it is unknown and could not be discovered.
            BlockedUrl, ValueError: its URL is not acceptable.
        """
        server_url = canonical_origin(server_url)
        if server_url == self._own_url:
            raise ValueError(f"{server_url} is this node: a follow between its own users needs no delivery")
        await self._ensure_known(session, server_url)
        now = self._clock.now()
        follow = Follow(
            id=new_id(),
            follower_id=follower_id,
            following_id=following_id,
            created_at=now,
            # The followed side's server: the acknowledgment is matched by it. See `Follow`.
            follower_server_url=server_url,
            requester_signature=requester_signature,
        )
        session.add(follow)
        payload = follow_activity(
            federation_url=self._own_url,
            follow_id=follow.id,
            created_at=now,
            follower_id=follower_id,
            following_id=following_id,
            follower_server_url=server_url,
            requester_signature=requester_signature,
        )
        delivery_id = await self._outbox.enqueue_delivery(
            session,
            FOLLOW_JOB,
            server_url + FOLLOWS_PATH,
            server_url,
            payload,
            ordering_key=_follow_key(follower_id, following_id),
        )
        return RequestedFollow(follow_id=follow.id, delivery_id=delivery_id)

    async def request_unfollow(
        self, session: AsyncSession, *, follower_id: str, following_id: str, server_url: str
    ) -> str | None:
        """The local user's follow is removed and the other server will hear of it; the delivery's id.

        None if there is nothing to send: there was no such follow, or its own request was never tried; that one is
        cancelled then. Otherwise the server hears of it after the follow, never before.
        """
        server_url = canonical_origin(server_url)
        removed = (
            delete(Follow)
            .where(
                col(Follow.follower_id) == follower_id,
                col(Follow.following_id) == following_id,
                col(Follow.follower_server_url) == server_url,
            )
            .returning(col(Follow.id))
        )
        if not (await session.execute(removed)).all():
            return None
        key = _follow_key(follower_id, following_id)
        if await cancelled_unsent(session, server_url, key, FOLLOW_JOB):
            return None
        payload = unfollow_activity(federation_url=self._own_url, follower_id=follower_id, following_id=following_id)
        return await self._outbox.enqueue_delivery(
            session, UNFOLLOW_JOB, server_url + FOLLOWS_PATH, server_url, payload, ordering_key=key
        )

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
        """The local user's post is stored, and a delivery owed to every server that shall have it.

        Those are the servers of accepted follows that name the author on either side; with the author's policy
        `followers` only of those who follow the author; with `none`, none.

        Raises:
            ValueError: receivers would refuse it: no content, or a block that lacks what its type requires.
        """
        now = self._clock.now()
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
            federation_url=self._own_url,
            post_id=post.id,
            content=content,
            author_id=author_id,
            published=post.published,
            is_private=is_private,
        )
        parse_model(PostActivity, payload)
        session.add(post)
        deliveries = await self._outbox.enqueue_fanout(
            session, POST_JOB, POSTS_PATH, await self._audience(session, author_id), payload
        )
        return PublishedPost(post_id=post.id, delivery_ids=deliveries)

    async def _audience(self, session: AsyncSession, author_id: str) -> list[str]:
        policy = (
            await session.execute(select(col(User.post_propagation_policy)).where(col(User.id) == author_id))
        ).scalar_one_or_none()
        if policy == "none":
            return []
        is_followed = col(Follow.following_id) == author_id
        named = is_followed if policy == "followers" else or_(is_followed, col(Follow.follower_id) == author_id)
        # Either column may hold the other party's server, by which side wrote the row.
        server = func.coalesce(col(Follow.follower_server_url), col(Follow.following_server_url))
        query = select(server).where(named, col(Follow.accepted).is_(True), server.is_not(None)).distinct()
        servers = (peer_registry_url(url, self._own_url) for url in (await session.execute(query)).scalars())
        return sorted({server for server in servers if server is not None})

    async def _ensure_known(self, session: AsyncSession, server_url: str) -> None:
        standing = await self._registry.standing(server_url)
        if standing.blacklisted:
            raise ServerRefused(f"{server_url} is blacklisted")
        if standing.server is not None:
            return
        document = await self._discovery.learn(server_url)
        await self._discovery.introduce_ourselves(server_url)
        await self._discovery.register(server_url, document, session=session)


def _follow_key(follower_id: str, following_id: str) -> str:
    """What a pair's follows and unfollows have in common, so that none overtakes another; ids may be of any length."""
    return "follow " + hashlib.sha256(f"{len(follower_id)} {follower_id} {following_id}".encode()).hexdigest()
