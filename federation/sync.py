"""Owing deliveries from plain code: threads, scripts, Flask, Django, `def` endpoints of FastAPI, Celery tasks.

The calls of `federation`, without `await`. They write through the caller's own connection, in the caller's thread and
transaction; one background loop per process does what follows the commit. Any thread may call them, after a fork too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from db.borrowed import DbApiConnection
from db.plain import PlainDatabase
from federation import tasks
from federation.app import Federation
from federation.delivery.plain_outbox import DjangoConnection, PlainOutbox
from federation.delivery.producers import Content, PublishedPost, RequestedFollow
from federation.process import background_node, close_background_node
from workers import DeduplicationMode, Enqueued, Task
from workers.background import background
from workers.homes import ForkLock, keep_inherited

T = TypeVar("T")

Caller: TypeAlias = "Session | Connection | DjangoConnection | DbApiConnection"
"""In whose transaction a delivery is owed: an SQLAlchemy or SQLModel session, an SQLAlchemy connection, Django's
`connection` in a `transaction.atomic` block, or one of `sqlite3` or psycopg 3."""


class _Plain:
    """This process's side of the node that serves plain code."""

    def __init__(self, node: Federation) -> None:
        self.node = node
        self.pid = os.getpid()
        self.database = PlainDatabase(node.settings.database_url.get_secret_value())
        self.outbox = PlainOutbox(node.outbox)


class _SyncProcess:
    """Written under the lock."""

    lock = ForkLock()
    plain: _Plain | None = None


def _plain() -> _Plain:
    found = _SyncProcess.plain
    if found is not None and found.pid == os.getpid():
        return found
    node = background_node()  # not under the lock: other threads' work in that loop may ask for it
    with _SyncProcess.lock:
        found = _SyncProcess.plain
        if found is not None and found.pid != os.getpid():
            keep_inherited(found)
            found = None
        if found is None:
            found = _SyncProcess.plain = _Plain(node)
    return found


@contextmanager
def transaction() -> Iterator[Session]:
    """`with transaction() as session:` commits; the jobs of every delivery enqueued in it are there then, or follow.

    The session is on the node's own database.

    Raises:
        RuntimeError: this thread is inside such a block already; hand its session on instead.
    """
    plain = _plain()
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
    """A delivery is owed from the moment `session` commits; returns its id. See `Outbox.enqueue_delivery`.

    Raises:
        TypeError: no session or connection of plain code; names the call that takes it.
        ValueError: as `Outbox.enqueue_delivery`; or it is closed, or in no transaction. Nothing is written then.
    """
    plain = _plain()

    def owe(inside: Session) -> str:
        planned = plain.node.outbox.owing.delivery(inside, name, target_url, server_url, payload, ordering_key)
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
    """One payload is owed to `path` on every server; returns the deliveries' ids. See `Outbox.enqueue_fanout`.

    Raises:
        TypeError, ValueError: as `enqueue_delivery`.
    """
    plain = _plain()

    def owe(inside: Session) -> tuple[str, ...]:
        planned = plain.node.outbox.owing.fanout(inside, name, path, server_urls, payload, ordering_key)
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
    """A follow is stored and its request owed; see `Producers.request_follow`.

    An unknown server is discovered first, over the network, while the calling thread waits: call this before the
    session's other writes.
    """
    plain = _plain()
    plain.outbox.check_kind(session, "request_follow")
    producers = plain.node.producers
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
    """A follow is removed and the other server will hear of it; see `Producers.request_unfollow`."""
    plain = _plain()
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
    """A post is stored and owed to every server that shall have it; see `Producers.publish_post`."""
    plain = _plain()
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
    """One run of the task is queued; see `federation.tasks.enqueue_task`.

    With `session` it is part of its transaction. Without one it is in the queue when this returns: the calling thread
    waits, and on SQLite must not hold a transaction open that has written.
    """
    plain = _plain()
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
        plain.node.outbox.owing.enter(inside)
        return plain.node.tasks_queue.enqueue_on(inside, [spec])[0]

    return plain.outbox.within(session, enqueue, "enqueue_task")


def close() -> None:
    """What this process has open for plain code is closed; the next call opens it anew."""
    with _SyncProcess.lock:
        plain, _SyncProcess.plain = _SyncProcess.plain, None
    if plain is not None:
        plain.database.close()
    close_background_node()
