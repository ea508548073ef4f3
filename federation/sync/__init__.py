"""Owing deliveries from synchronous code: threads, scripts, Flask, Django, `def` endpoints of FastAPI, Celery tasks.

These are the calls of `federation`, without `await`. They write through the caller's own connection, in the caller's
thread and transaction; one background loop per process does what follows the commit. Any thread may call them, even
after a fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from federation import tasks
from federation.sealed.outbound.activities import Content, PublishedPost, RequestedFollow
from federation.sync.process import Caller, close, plain_node
from workers import DeduplicationMode, Enqueued, Task
from workers.background import background

if TYPE_CHECKING:
    from federation.sync import activitypub

__all__ = [
    "Caller",
    "activitypub",
    "close",
    "enqueue_delivery",
    "enqueue_fanout",
    "enqueue_task",
    "publish_post",
    "request_follow",
    "request_unfollow",
    "transaction",
]


@contextmanager
def transaction() -> Iterator[Session]:
    """Begin a transaction: `with transaction() as session:` commits.

    The jobs of every delivery enqueued in it are in the queue then, or follow. The session is on the node's own
    database.

    Raises:
        RuntimeError: this thread is inside such a block already; hand its session on instead.
    """
    plain = plain_node()
    with plain.database.transaction() as session, plain.outbox.owed_in(session):
        yield session


def enqueue_delivery(
    session: Caller,
    name: str,
    target_url: str,
    server_url: str,
    payload: str,
    *,
    ordering_key: str | None = None,
) -> str:
    """Owe a delivery from the moment `session` commits, and return its id. See `federation.enqueue_delivery`.

    Raises:
        TypeError: no synchronous session or connection; the message names the call that accepts it.
        ValueError: as `Outbox.enqueue_delivery`; or it is closed, or in no transaction. Nothing is written then.
    """
    plain = plain_node()

    def owe(inside: Session) -> str:
        planned = plain.node.outbox.inserter.delivery(inside, name, target_url, server_url, payload, ordering_key)
        plain.outbox.plan(inside, planned)
        return planned.owed[0]

    return plain.outbox.within(session, owe, "enqueue_delivery")


def enqueue_fanout(
    session: Caller,
    name: str,
    path: str,
    server_urls: Iterable[str],
    payload: str,
    *,
    ordering_key: str | None = None,
) -> tuple[str, ...]:
    """Owe one payload to `path` on every server, and return the deliveries' ids. See `Outbox.enqueue_fanout`.

    Raises:
        TypeError, ValueError: as `enqueue_delivery`.
    """
    plain = plain_node()

    def owe(inside: Session) -> tuple[str, ...]:
        planned = plain.node.outbox.inserter.fanout(inside, name, path, server_urls, payload, ordering_key)
        if planned is None:
            return ()
        plain.outbox.plan(inside, planned)
        return planned.owed

    return plain.outbox.within(session, owe, "enqueue_fanout")


def request_follow(
    session: Caller,
    *,
    follower_id: str,
    following_id: str,
    server_url: str,
    requester_signature: str | None = None,
) -> RequestedFollow:
    """Store a follow and owe its request; see `Producers.request_follow`.

    An unknown server is discovered first, over the network, while the calling thread waits: call this before the
    session's other writes.
    """
    plain = plain_node()
    plain.outbox.check_kind(session, "request_follow")
    producers = plain.node.producers
    if not background.run(lambda: producers.has_user(follower_id)):
        plain.outbox.within(session, partial(producers.require_user, user_id=follower_id), "request_follow")
    met = background.run(lambda: producers.meet(server_url))
    follow = partial(
        producers.follow,
        plan=plain.outbox.plan,
        met=met,
        follower_id=follower_id,
        following_id=following_id,
        requester_signature=requester_signature,
    )
    return plain.outbox.within(session, follow, "request_follow")


def request_unfollow(session: Caller, *, follower_id: str, following_id: str, server_url: str) -> str | None:
    """Remove a follow and owe the news of it to the other server; see `Producers.request_unfollow`."""
    plain = plain_node()
    unfollow = partial(
        plain.node.producers.produced.unfollow,
        plan=plain.outbox.plan,
        follower_id=follower_id,
        following_id=following_id,
        server_url=server_url,
    )
    return plain.outbox.within(session, unfollow, "request_unfollow")


def publish_post(
    session: Caller,
    *,
    author_id: str,
    content: Content,
    published: datetime | None = None,
    is_private: bool | None = None,
    post_id: str | None = None,
    author_signature: str | None = None,
) -> PublishedPost:
    """Store a post and owe it to every server that is to have it; see `Producers.publish_post`."""
    plain = plain_node()
    post = partial(
        plain.node.producers.produced.post,
        plan=plain.outbox.plan,
        author_id=author_id,
        content=content,
        published=published,
        is_private=is_private,
        post_id=post_id,
        author_signature=author_signature,
    )
    return plain.outbox.within(session, post, "publish_post")


def enqueue_task(
    task: Task,
    data: object,
    *,
    session: Caller | None = None,
    deduplication_key: str | None = None,
    deduplication_mode: DeduplicationMode = DeduplicationMode.THROTTLE,
    delay: timedelta = timedelta(0),
    ordering_key: str | None = None,
) -> Enqueued:
    """Queue one run of the task; see `federation.tasks.enqueue_task`.

    With `session` it is part of its transaction. Without one it is in the queue when this returns: the calling thread
    waits, and on SQLite must not hold a transaction open that has written.
    """
    plain = plain_node()
    if session is None:
        return background.run(
            lambda: tasks.enqueue_task(
                task,
                data,
                deduplication_key=deduplication_key,
                deduplication_mode=deduplication_mode,
                delay=delay,
                ordering_key=ordering_key,
            )
        )
    plain.outbox.check_kind(session, "enqueue_task")
    spec = tasks.joining_spec(
        plain.node,
        task,
        data,
        deduplication_key=deduplication_key,
        deduplication_mode=deduplication_mode,
        delay=delay,
        ordering_key=ordering_key,
    )

    def enqueue(inside: Session) -> Enqueued:
        plain.node.outbox.inserter.enter(inside)
        return plain.node.tasks_queue.enqueue_on(inside, [spec])[0]

    return plain.outbox.within(session, enqueue, "enqueue_task")


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the calls of ActivityPub when they are first used: no other node has a use for it."""
        if name != "activitypub":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("federation.sync.activitypub")
