"""`POST /api/auth/social/posts`: a remote user's post arrives.

Theory of operation. One transaction checks and stores, one at a time for each (server, post id). If the same post comes
again, as it does after a lost acknowledgment, it is acknowledged with the existing row. Other content under a known id
is a conflict, because peers know no message that edits a post.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import structlog
from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col
from starlette.responses import Response

from db import Database, Post, User, one_at_a_time
from federation.node.front import Inbound
from federation.node.inbox import Inbox, Received
from federation.node.refusals import Refusal
from federation.protocol.acks import post_ack
from federation.protocol.activities import ActivityMethod, PostActivity
from federation.sealed.peers.registry import KnownServer

log = structlog.get_logger(__name__)

POSTS_PATH: Final = "/api/auth/social/posts"
POST_MODELS: Final[Mapping[ActivityMethod, type[PostActivity]]] = {ActivityMethod.FEDERATE_POST: PostActivity}


class PostsInbox:
    """Callable with a request to the posts endpoint."""

    def __init__(self, *, own_url: str, inbox: Inbox, database: Database) -> None:
        self._own_url = own_url
        self._inbox = inbox
        self._database = database

    async def __call__(self, inbound: Inbound) -> Response:
        """Store the post, and acknowledge it, as every repeat is acknowledged, too.

        Raises:
            Refusal: nothing was changed.
        """
        return await self.apply(await self._inbox.open(inbound, POST_MODELS, malformed_post))

    async def apply(self, received: Received[PostActivity]) -> Response:
        """Do the same for a post that was opened already.

        Raises:
            Refusal: nothing was changed.
        """
        arrived = _row(received.sender, received.activity)
        async with self._database.transaction() as session:
            stored = await _stored(session, arrived)
            await _require_remote_author(session, received.activity)
            if stored is None:
                session.add(arrived)
            elif not _is_same(stored, arrived):
                raise Refusal(409, "Another post with this id is stored already", code="FEDERATED_POST_ALREADY_EXISTS")
            row = stored or arrived
            plaintext = post_ack(own_url=self._own_url, post_id=row.id, federation_post_id=received.activity.post.id)
            acknowledgment = self._inbox.acknowledge(received, plaintext)
        event = "post_replayed" if stored else "post_received"
        log.info(event, server_url=received.sender.url, post_id=row.id, federation_post_id=row.federation_post_id)
        return acknowledgment


def malformed_post(where: str, problem: str) -> Refusal:
    """Return the refusal of a request that is no post."""
    return Refusal(400, f"[{where}] {problem}", code="INVALID_FEDERATED_POST_PAYLOAD")


def _row(sender: KnownServer, activity: PostActivity) -> Post:
    post = activity.post
    return Post(
        content=[*post.content_json()],
        federated_author_id=post.author_id,
        published=post.published,
        is_private=post.is_private,
        created_at=datetime.now(UTC),
        federation_url=sender.url,
        federation_post_id=post.id,
    )


async def _require_remote_author(session: AsyncSession, activity: PostActivity) -> None:
    """Check that the author is no user of ours, to whom the post would seem to belong.

    Raises:
        Refusal: it is.
    """
    query = select(exists().where(col(User.id) == activity.post.author_id))
    if (await session.execute(query)).scalar_one():
        raise Refusal(403, "The author is a user of this server, not of the sending one", reason="AUTHOR_IS_LOCAL")


async def _stored(session: AsyncSession, arrived: Post) -> Post | None:
    assert arrived.federation_url is not None
    assert arrived.federation_post_id is not None
    await one_at_a_time(session, "post", arrived.federation_url, arrived.federation_post_id)
    query = (
        select(Post)
        .where(
            col(Post.federation_url) == arrived.federation_url,
            col(Post.federation_post_id) == arrived.federation_post_id,
        )
        .order_by(col(Post.created_at))
        .limit(1)
    )
    row: Post | None = (await session.execute(query)).scalar_one_or_none()
    return row


def _is_same(stored: Post, arrived: Post) -> bool:
    return (stored.content, stored.federated_author_id, stored.published, bool(stored.is_private)) == (
        arrived.content,
        arrived.federated_author_id,
        arrived.published,
        arrived.is_private,
    )
