"""Owing a delivery from synchronous code: in the transaction of a `Session`, of a `Connection`, or of Django.

Theory of operation. The module `insert` writes the rows, in the calling thread and on the caller's connection, so
nothing waits for the lock that the caller holds. Where the queue lives in the same database, the jobs are written
there, too, and nothing is left to do. Elsewhere they are added after the commit, in the background loop, while the
caller goes on. A session announces that its commit has happened. A connection only announces that one is about to
begin, Django only that one has ended, and neither says which rows are still part of it. So we look which rows exist,
and these get their jobs. Whatever is missed is found by the sweeper.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import structlog
from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from federation.delivery.outbox.insert import Pending, Planned, follow_commit, pending_of, set_pending
from federation.delivery.outbox.outbox import Outbox
from workers.background import background
from workers.borrowed import DjangoConnection, borrowed, check_transaction, django_connection, is_dbapi_connection

log = structlog.get_logger(__name__)

T = TypeVar("T")

MOST_WAITING: Final = 100_000
"""How many jobs may wait for a queue that does not answer; the rest is left to the sweeper."""
LOOKS: Final = (0.01, 0.05, 0.25, 1.0, 4.0)
"""Pauses in seconds before each look for rows that are about to be committed; what takes longer is the sweeper's."""


class Later:
    """Jobs that follow commits: any thread hands them in, and the background loop adds them, many at a time."""

    def __init__(self, add: Callable[[list[Planned]], Awaitable[None]]) -> None:
        self._add = add
        self._lock = threading.Lock()
        self._waiting: deque[Planned] = deque()
        self._count = 0
        self._serving = False

    def put(self, planned: list[Planned]) -> None:
        """Hand in jobs whose rows are committed. Returns at once."""
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
    """The counterpart of `Outbox` for synchronous code; it uses `outbox` in the background loop."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._inserter = outbox.inserter
        self._joins = outbox.joins
        self._later = Later(outbox.add)

    @contextmanager
    def owed_in(self, session: Session) -> Iterator[None]:
        """Add the jobs of what the block owes in `session`, which the caller commits after the block."""
        if not self._joins:
            yield
            return
        pending = Pending()
        set_pending(session, pending)
        yield
        self._inserter.add_jobs(session, pending.take(session))

    def within(self, caller: object, work: Callable[[Session], T], call: str) -> T:
        """Run `work` with a session in the caller's transaction, and return its result. `call` names the caller.

        Raises:
            TypeError: synchronous code does not write through such an object; the message names the call that accepts
                it.
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
            check_transaction(caller)
            with borrowed(caller) as connection:
                return self._on_connection(connection, work, follow=self._look_soon)
        raise _not_plain(caller, call)

    def check_kind(self, caller: object, call: str) -> None:
        """Check that synchronous code can write through `caller`, and that it is in a transaction.

        Raises:
            TypeError, ValueError: as `within`.
        """
        if not isinstance(caller, (Session, Connection)) and django_connection(caller) is None:
            if not is_dbapi_connection(caller):
                raise _not_plain(caller, call)
            check_transaction(caller)

    def plan(self, session: Session, planned: Planned) -> None:
        """Add the jobs in the session's transaction, or after its commit."""
        pending = pending_of(session)
        if pending is not None:
            pending.planned.append(planned)
        elif self._joins:
            self._inserter.add_jobs(session, [planned])
        else:
            follow_commit(session, self._later.put).planned.append(planned)

    def _on_connection(
        self, connection: Connection, work: Callable[[Session], T], *, follow: Callable[[list[str]], None]
    ) -> T:
        """Run `work` in the connection's transaction, and tell `follow` which deliveries to look for after it."""
        if connection.closed:
            raise ValueError("this connection is closed; nothing was written")
        if not connection.in_transaction():
            connection.begin()
        # Other modes would commit or release something when this session ends.
        with Session(connection, expire_on_commit=False, join_transaction_mode="rollback_only") as session:
            pending = Pending()
            set_pending(session, pending)
            result = work(session)
            session.flush()
            if self._joins:
                self._inserter.add_jobs(session, pending.planned)
        ready = [delivery_id for each in pending.planned for delivery_id, _, _ in each.deliveries]
        if ready and not self._joins:
            follow(ready)
        return result

    def _follow(self, connection: Connection, ready: list[str]) -> None:
        # A connection has no event after a commit, only this one right before it.
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
