"""What the users of a node without an application do: follow, post, and read what came from elsewhere.

These are the calls of `federation.service`, in a transaction of their own that also notes who asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue
from sqlalchemy import Select, select, tuple_
from sqlmodel import col

from db import Database, Post
from federation.admin.users import require_table
from federation.base.audit import Order, noted
from federation.runtime.composition import Federation
from federation.sealed.outbound.activities import Content, PublishedPost, RequestedFollow


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPost:
    """A post that another server sent. `id` is ours; `author_id` and `published` are as that server says."""

    id: str
    author_id: str | None
    server_url: str
    published: datetime
    received_at: datetime
    is_private: bool
    content: Sequence[JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPage:
    """Some posts, the latest first, and the id to go on after, which is None at the end."""

    posts: list[ReceivedPost]
    after: str | None


class NoSuchPost(LookupError):
    """There is no post of that id here, or no more."""

    def __init__(self, post_id: str) -> None:
        super().__init__(f"there is no post {post_id!r} here")


async def follow(
    federation: Federation, *, follower_id: str, following_id: str, server_url: str, patience: float, order: Order
) -> RequestedFollow:
    """Ask for a local user to follow one of another server; see `Producers.request_follow`.

    `patience` is how many seconds a server that is not known yet may take to say who it is.

    Raises:
        TimeoutError: it took longer. Nothing was written.
        UnknownUser: the follower is no user of this node.
        ConfigurationError: there is no table of users.
        ServerRefused, DiscoveryError, BlockedUrl, ValueError: as `request_follow`.
    """
    await _require_tables(federation.database, "user")
    if await federation.producers.has_user(follower_id):
        async with asyncio.timeout(patience):
            await federation.producers.meet(server_url)
    async with federation.outbox.transaction() as session:
        asked = await federation.producers.request_follow(
            session, follower_id=follower_id, following_id=following_id, server_url=server_url
        )
        await session.execute(noted(order, affected=1))
    return asked


async def publish(
    federation: Federation, *, author_id: str, content: Content, is_private: bool, order: Order
) -> PublishedPost:
    """Publish a post of a local user; see `Producers.publish_post`.

    Raises:
        UnknownUser: the author is no user of this node.
        ConfigurationError: there are no tables of users or posts.
        ValueError: as `publish_post`.
    """
    await _require_tables(federation.database, "user", "posts")
    async with federation.outbox.transaction() as session:
        post = await federation.producers.publish_post(
            session, author_id=author_id, content=content, is_private=is_private
        )
        await session.execute(noted(order, affected=1))
    return post


async def received(database: Database, *, limit: int, after: str | None = None) -> ReceivedPage:
    """Return posts of other servers, the latest first, those behind the one with the id *after*.

    Raises:
        NoSuchPost: there is none of that id.
        ConfigurationError: there is no table of posts.
    """
    async with database.read() as session:
        await (await session.connection()).run_sync(require_table, "posts")
        if after is not None and (await session.get(Post, after)) is None:
            raise NoSuchPost(after)
        rows = (await session.execute(_arrived(after).limit(limit + 1))).scalars().all()
    posts = [_read(row) for row in rows[:limit]]
    return ReceivedPage(posts=posts, after=posts[-1].id if len(rows) > limit else None)


def _arrived(after: str | None) -> Select[Post]:
    order = tuple_(col(Post.created_at), col(Post.id))
    query = select(Post).where(col(Post.federation_url).is_not(None))
    if after is not None:
        place = select(col(Post.created_at), col(Post.id)).where(col(Post.id) == after)
        query = query.where(order < place.scalar_subquery())
    return query.order_by(col(Post.created_at).desc(), col(Post.id).desc())


def _read(row: Post) -> ReceivedPost:
    assert row.federation_url is not None
    return ReceivedPost(
        id=row.id,
        author_id=row.federated_author_id,
        server_url=row.federation_url,
        published=row.published,
        received_at=row.created_at,
        is_private=bool(row.is_private),
        content=row.content if isinstance(row.content, list) else [],
    )


async def _require_tables(database: Database, *tables: str) -> None:
    async with database.read() as session:
        connection = await session.connection()
        for table in tables:
            await connection.run_sync(require_table, table)
