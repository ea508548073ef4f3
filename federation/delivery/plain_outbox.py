"""Owing a delivery from plain code: in the transaction of a `Session`, a `Connection`, or of Django.

Theory of operation. What is written is `owing`'s, in the calling thread and on the caller's connection, so nothing
waits for the lock that the caller holds. Where the queue lives in the same database, so do the jobs, and nothing is
left to do. Elsewhere they are added after the commit, in the background loop, while the caller goes on. A session tells
of its commit. A connection tells that one begins, Django that one has ended, and neither which rows are still part of
it: then the rows are looked at, and those that are there get their jobs. Whatever is missed is found by the sweeper.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol, TypeVar, cast

import structlog
from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from db.borrowed import DbApiConnection, borrowed, in_transaction, is_dbapi_connection
from federation.delivery.following import Pending, follow_commit, pending_of, set_pending
from federation.delivery.outbox import Outbox
from federation.delivery.owing import Planned
from workers.background import background

log = structlog.get_logger(__name__)

T = TypeVar("T")

MOST_WAITING: Final = 100_000
"""Jobs that wait for a queue that does not answer; the rest is left to the sweeper."""
LOOKS: Final = (0.01, 0.05, 0.25, 1.0, 4.0)
"""Pauses in seconds before each look for rows that are about to be committed; later ones are left to the sweeper."""


class Later:
    """Jobs that follow commits: handed in by any thread, added by the background loop, many at a time."""

    def __init__(self, add: Callable[[list[Planned]], Awaitable[None]]) -> None:
        self._add = add
        self._lock = threading.Lock()
        self._waiting: deque[Planned] = deque()
        self._count = 0
        self._serving = False

    def put(self, planned: list[Planned]) -> None:
        """These are committed; returns at once."""
        count = sum(len(each.deliveries) for each in planned)
        if not count:
            return
        with self._lock:
            full = self._count + count > MOST_WAITING
            if not full:
                self._waiting.extend(planned)
                self._count += count
            begin, self._serving = not self._serving, True
        if full:
            log.error("outbox_jobs_not_added", count=count, error="QueueTooSlow")
        if begin:
            background.soon(self._serve)

    async def _serve(self) -> None:
        while taken := self._take():
            await self._add(taken)

    def _take(self) -> list[Planned]:
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            self._count = 0
            self._serving = bool(taken)
        return taken


class PlainOutbox:
    """As `Outbox`, for plain code, which it serves from `outbox` in the background loop."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._owing = outbox.owing
        self._joins = outbox.joins
        self._later = Later(outbox.add)

    @contextmanager
    def owed_in(self, session: Session) -> Iterator[None]:
        """What the block owes in `session`, which is committed after it, gets its jobs."""
        if not self._joins:
            yield
            return
        pending = Pending()
        set_pending(session, pending)
        yield
        self._owing.add_jobs(session, pending.take(session))

    def within(self, caller: object, work: Callable[[Session], T], call: str) -> T:
        """What `work` did with a session in the caller's transaction; `call` is who asks.

        Raises:
            TypeError: it is nothing that plain code writes through; names the call that takes it.
            ValueError: it is closed, or in no transaction that could be rolled back.
        """
        if isinstance(caller, Session):
            return work(caller)
        if isinstance(caller, Connection):
            return self._on_connection(caller, work, follow=partial(self._follow, caller))
        if (django := django_connection(caller)) is not None:
            follow = partial(self._after_django, django)
            with borrowed(django.connection) as connection:
                return self._on_connection(connection, work, follow=follow)
        if is_dbapi_connection(caller):
            _check_transaction(caller)
            with borrowed(caller) as connection:
                return self._on_connection(connection, work, follow=self._look_soon)
        raise _not_plain(caller, call)

    def check_kind(self, caller: object, call: str) -> None:
        """Nothing happens if it is something that plain code writes through, in a transaction.

        Raises:
            TypeError, ValueError: as `within`.
        """
        if not isinstance(caller, (Session, Connection)) and django_connection(caller) is None:
            if not is_dbapi_connection(caller):
                raise _not_plain(caller, call)
            _check_transaction(caller)

    def plan(self, session: Session, planned: Planned) -> None:
        """The jobs follow the session's commit, or are part of its transaction."""
        pending = pending_of(session)
        if pending is not None:
            pending.planned.append(planned)
        elif self._joins:
            self._owing.add_jobs(session, [planned])
        else:
            follow_commit(session, self._later.put).planned.append(planned)

    def _on_connection(
        self, connection: Connection, work: Callable[[Session], T], *, follow: Callable[[list[str]], None]
    ) -> T:
        """`work` is done in the connection's transaction; `follow` is told which deliveries to look for after it."""
        if connection.closed:
            raise ValueError("this connection is closed; nothing was written")
        if not connection.in_transaction():
            connection.begin()
        # In the modes that commit or release something, what is written would go with this session.
        with Session(connection, expire_on_commit=False, join_transaction_mode="rollback_only") as session:
            pending = Pending()
            set_pending(session, pending)
            result = work(session)
            session.flush()
            if self._joins:
                self._owing.add_jobs(session, pending.planned)
        ready = [delivery_id for each in pending.planned for delivery_id, _, _ in each.deliveries]
        if ready and not self._joins:
            follow(ready)
        return result

    def _follow(self, connection: Connection, ready: list[str]) -> None:
        # There is no event after a commit, only this one right before.
        event.listen(connection, "commit", lambda _: self._look_soon(ready), once=True)

    def _after_django(self, django: DjangoConnection, ready: list[str]) -> None:
        django.on_commit(lambda: self._look_soon(ready))

    def _look_soon(self, ready: list[str]) -> None:
        background.soon(partial(self._look, ready))

    async def _look(self, ready: list[str]) -> None:
        for pause in LOOKS:
            await asyncio.sleep(pause)
            ready = await self._outbox.add_committed(ready)
            if not ready:
                return


def _check_transaction(connection: DbApiConnection) -> None:
    if not in_transaction(connection):
        raise ValueError("this connection is in autocommit; begin a transaction, which the delivery is part of")


def _not_plain(caller: object, call: str) -> TypeError:
    if isinstance(caller, (AsyncSession, AsyncConnection)):
        return TypeError(
            f"federation.sync.{call} takes a Session or a Connection, not {type(caller).__name__}; an AsyncSession"
            f" goes to `await federation.{call}`"
        )
    return TypeError(
        f"federation.sync.{call} takes an SQLAlchemy or SQLModel Session, an SQLAlchemy Connection, Django's"
        f" connection, or one of sqlite3 or psycopg, not {type(caller).__name__}"
    )


class DjangoConnection(Protocol):
    """What is asked of `django.db.connection`."""

    alias: str
    connection: DbApiConnection
    in_atomic_block: bool

    def on_commit(self, func: Callable[[], None]) -> None: ...


def django_connection(caller: object) -> DjangoConnection | None:
    """Django's connection, None if it is something else.

    Raises:
        ValueError: it is in no `transaction.atomic` block, or on another driver than ours.
    """
    wrapper = getattr(sys.modules.get("django.db.backends.base.base"), "BaseDatabaseWrapper", ())
    proxy = getattr(sys.modules.get("django.utils.connection"), "ConnectionProxy", ())
    if not isinstance(caller, (wrapper, proxy)):
        return None
    found = cast(DjangoConnection, caller)
    if not found.in_atomic_block:
        raise ValueError(
            f"Django's connection {found.alias!r} is in autocommit; owe deliveries in a block of that very one:"
            f" `with transaction.atomic(using={found.alias!r}):`"
        )
    if not is_dbapi_connection(found.connection):
        driver = type(found.connection).__module__
        raise ValueError(f"Django's connection is one of {driver}; deliveries are owed through sqlite3 or psycopg 3")
    return found
