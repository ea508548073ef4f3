"""Owing a delivery from plain code: in the transaction of a `Session`, a `Connection`, or of Django.

Theory of operation. What is written is `owing`'s, in the calling thread and on the caller's connection, so nothing
waits for the lock that the caller holds. Where the queue lives in the same database, so do the jobs, and nothing is
left to do. Elsewhere they are added after the commit, in the background loop, while the caller goes on. A session tells
of its commit. A connection tells that one begins, Django that one has ended, and neither which rows are still part of
it: then the rows are looked at, and those that are there get their jobs. Whatever is missed is found by the sweeper.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from federation.delivery.following import Pending, follow_commit, pending_of, set_pending
from federation.delivery.owing import Owing, Planned
from workers.background import background

log = structlog.get_logger(__name__)

T = TypeVar("T")

MOST_WAITING: Final = 100_000
"""Jobs that wait for a queue that does not answer; the rest is left to the sweeper."""


class Transactions(Protocol):
    """A database's transactions for plain code."""

    def transaction(self) -> Iterator[Session]: ...


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
        if begin and not background.soon(self._serve):
            log.error("outbox_jobs_not_added", count=count, error="InterpreterEnding")

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
    """As `Outbox`, for plain code. `add` has the queue take the jobs of committed rows, in the background loop."""

    def __init__(self, owing: Owing, *, joins: bool, add: Callable[[list[Planned]], Awaitable[None]]) -> None:
        self._owing = owing
        self._joins = joins
        self._later = Later(add)

    @contextmanager
    def owed_in(self, session: Session) -> Iterator[None]:
        """What the block owes in `session` gets its jobs: all together at its end, or when the session has committed.

        For a session that is committed after the block, once.
        """
        pending = Pending()
        if self._joins:
            set_pending(session, pending)
        yield
        if self._joins:
            self._owing.add_jobs(session, pending.take(session))

    def within(self, caller: object, work: Callable[[Session], T], call: str) -> T:
        """What `work` did with a session in the caller's transaction; `call` is who asks.

        Raises:
            TypeError: it is no session or connection of plain code; names the call that takes it.
            ValueError: it is closed.
        """
        if isinstance(caller, Session):
            return work(caller)
        if isinstance(caller, (AsyncSession, AsyncConnection)):
            raise TypeError(
                f"federation.sync.{call} takes a Session or a Connection, not {type(caller).__name__}; an AsyncSession"
                f" goes to `await federation.{call}`"
            )
        raise TypeError(
            f"federation.sync.{call} takes an SQLAlchemy Session or Connection, not {type(caller).__name__}"
        )

    def plan(self, session: Session, planned: Planned) -> None:
        """The jobs follow the session's commit, or are part of its transaction."""
        pending = pending_of(session)
        if pending is not None:
            pending.planned.append(planned)
        elif self._joins:
            self._owing.add_jobs(session, [planned])
        else:
            follow_commit(session, self._later.put).planned.append(planned)
