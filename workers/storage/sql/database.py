"""The interface of `SqlStorage` to a database: the steps of a queue, which never block the event loop.

Theory of operation. What joins a caller's transaction works without being connected; from plain code also without an
event loop. Everything is written over the caller's connection, even the registration of the queue and its limits: a
connection of our own would wait for the lock that the caller holds. So the queue's number is read there as well. It is
remembered, unless the same transaction assigned it, because that may be rolled back; so it is with limits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, RootTransaction, text

from workers.homes import ForkLock
from workers.jobs import (
    Claim,
    CronRow,
    EnqueueResult,
    NewJob,
    ProgressReport,
    Recovery,
    Renewal,
    Settlement,
    SettleOutcome,
)
from workers.limits import Limit
from workers.storage.abilities import Admission, Exchange
from workers.storage.sql import schema
from workers.storage.sql.caller import Caller, when_committed
from workers.storage.sql.direct import Executor, plain
from workers.storage.sql.rows import Transaction, encode_text
from workers.storage.sql.steps.limits import declare
from workers.storage.subscribers import DatabaseSubscribers

T = TypeVar("T")
R = TypeVar("R", covariant=True)

Begin: TypeAlias = Callable[[Executor], Transaction]
"""Makes a queue's transaction of a connection."""


class InEventLoop(Protocol[R]):
    """A step that the event loop carries out to its end; what it has of a future is like that's."""

    def __await__(self) -> Generator[object, None, R]: ...

    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...  # of this very object

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...

    def result(self) -> R: ...


Step: TypeAlias = Future[T] | InEventLoop[T]
"""What a thread, or the event loop that began it, carries out to its end, whether somebody waits for it or not."""


async def outcome(step: Step[T]) -> T:
    """Wait for a step; if this is cancelled, it goes on, unless it has not begun."""
    return await (asyncio.wrap_future(step) if isinstance(step, Future) else step)


class Database(Protocol):
    """One database as this process uses it, shared by all storages on it."""

    subscribers: DatabaseSubscribers
    wakes_with_the_commit: bool
    """Whether a wake-up comes when its job can be claimed; otherwise waiters have to look whether it can already."""

    def enqueue(self, begin: Begin, jobs: Sequence[NewJob]) -> Step[list[EnqueueResult]]: ...

    async def enqueue_with(self, connection: object, begin: Begin, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        """Enqueue; see `change_with`."""

    def claim(self, begin: Begin, worker_id: str, leases: Mapping[str, timedelta], limit: int) -> Step[list[Claim]]: ...

    def claimable_in(self, begin: Begin, names: Collection[str]) -> Step[timedelta | None]:
        """Return how long until a claim for `names` may succeed, 0 for now; None while there is nothing to wait for."""

    def renew(self, begin: Begin, claims: Sequence[Claim]) -> Step[Renewal]: ...

    def settle(self, begin: Begin, settlements: Sequence[Settlement]) -> Step[list[SettleOutcome]]: ...

    def exchange(
        self,
        begin: Begin,
        settlements: Sequence[Settlement],
        worker_id: str,
        leases: Mapping[str, timedelta],
        limit: int,
    ) -> Step[Exchange] | None:
        """Settle and claim in one transaction; None, with nothing done, if that would be more work than apart."""

    def replace_cron(self, begin: Begin, row: CronRow, jobs: Sequence[NewJob]) -> Future[bool]: ...

    async def settle_with(
        self, connection: object, begin: Begin, settlements: Sequence[Settlement]
    ) -> list[SettleOutcome]:
        """Settle; see `change_with`."""

    def progress(self, begin: Begin, reports: Sequence[ProgressReport]) -> Step[None]: ...

    def recover(self, begin: Begin, limit: int, max_stalls: int) -> Future[Recovery]: ...

    def look(self, begin: Begin, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> Future[T]:
        """Run `work`, which only reads; each statement sees what was committed before it.

        With `at_leisure` a server may take minutes over it; otherwise one that is silent for long is absent.
        """

    def change(self, begin: Begin, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> Future[T]:
        """Run `work` in a transaction of its own, rolled back when it raises, and announce its events; see `look`."""

    async def change_with(self, connection: object, begin: Begin, work: Callable[[Transaction], T]) -> T:
        """Run `work` as part of the caller's transaction, and announce its events when that has committed.

        Raises:
            TypeError: `connection` is not an SQLAlchemy connection or session.
            StorageError: it belongs to another database.
        """

    def change_on(self, caller: Caller, begin: Begin, work: Callable[[Transaction], T]) -> T:
        """Run `work` on a synchronous connection or session, in the calling thread; see `change_with`."""

    def enqueue_on(self, caller: Caller, begin: Begin, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        """Enqueue; see `change_on`."""

    def refuse_nested(self) -> None:
        """Raise if a change would wait for a transaction that the running task itself holds open.

        Raises:
            TransactionError: it would wait for itself.
        """

    def look_now(self) -> None:
        """Tell those who wait or listen at once what a caller's connection has committed."""

    def wake(self, begin: Begin) -> Step[None]:
        """Wake those who wait for jobs of the queue."""

    def hear(self) -> None:
        """Tell waiters, from now on, what other processes commit; once that works, they look again."""

    async def subscribe(self, begin: Begin, queue: int, *, of_one_job: bool = False) -> None:
        """Let every event of the queue that is committed from now on reach `subscribers`.

        With `of_one_job` some from before may reach them too, as a subscriber of one job has to expect.
        """

    async def listen_for_cancels(self) -> None:
        """Let every request to cancel a running job that is committed from now on reach `subscribers`."""

    async def release(self) -> None:
        """Count one user less; with the last one its threads end and its connections are closed."""


_FIND_QUEUE = text("SELECT id FROM workers_queues WHERE name = :name")
_ADD_QUEUE = text("INSERT INTO workers_queues (name) VALUES (:name) ON CONFLICT (name) DO NOTHING")


def find_queue(connection: Executor, name: str) -> int:
    """Return the queue's number, 0 if it has none yet.

    Raises:
        StorageError: the tables are not there, or of another version.
    """
    schema.check(plain(connection))
    return int(connection.execute(_FIND_QUEUE, _named(connection, name)).scalar() or 0)


def add_queue(connection: Executor, name: str) -> int:
    """Give the queue a number if it has none, and return it."""
    connection.execute(_ADD_QUEUE, _named(connection, name))
    return find_queue(connection, name)


class Joined:
    """One queue as callers' transactions reach it; safe to use from any thread, and after a fork.

    The database is held from the first use to `release`, because it tells the waiters of this process.
    """

    def __init__(self, name: str, acquire: Callable[[], Database], clock: Callable[[Executor], int]) -> None:
        self._name = name
        self._acquire = acquire
        self._clock = clock
        self._lock = ForkLock()
        self._held: tuple[int, Database] | None = None  # with the process that holds it
        self._id = 0
        self._limits: dict[str, Limit] = {}
        self._adding: WeakSet[RootTransaction] = WeakSet()

    def knows(self, queue: int, *, limits: Mapping[str, Limit] | None = None) -> None:
        """Note the queue's number, and limits of it, that are committed."""
        self._id = queue
        for name in limits or ():
            self._limits.pop(name, None)

    def bring_limits(self, limits: Mapping[str, Limit]) -> None:
        """See `Joinable.bring_limits`."""
        self._limits.update(limits)

    def enqueue_on(self, caller: Caller, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        """See `SqlStorage.enqueue_on`."""
        return self.database().enqueue_on(caller, self._begin, jobs)

    async def enqueue(self, connection: object, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        return await self.database().enqueue_with(connection, self._begin, jobs)

    async def settle(self, connection: object, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        return await self.database().settle_with(connection, self._begin, settlements)

    async def change(self, connection: object, work: Callable[[Transaction], T]) -> T:
        return await self.database().change_with(connection, self._begin, work)

    async def release(self) -> None:
        """Release the database, if it is held."""
        held, self._held = self._held, None
        if held is not None:
            await held[1].release()

    def database(self) -> Database:
        """Return the database, which is held from now on."""
        held = self._held
        if held is not None and held[0] == os.getpid():
            return held[1]
        with self._lock:
            if self._held is None or self._held[0] != os.getpid():
                self._held = (os.getpid(), self._acquire())
            return self._held[1]

    @asynccontextmanager
    async def telling(self, connection: object) -> AsyncIterator[None]:
        """Tell of what the connection commits in the block, or after it; see `SqlStorage.with_notify`."""
        database = self.database()
        try:
            yield
        finally:
            when_committed(connection, database.look_now)

    def _begin(self, connection: Executor) -> Transaction:
        queue = self._id or self._number(plain(connection))
        transaction = Transaction(connection=connection, queue=queue, clock=self._clock)
        if self._limits:
            self._declare(transaction, plain(connection).get_transaction())
        return transaction

    def _declare(self, transaction: Transaction, within: RootTransaction | None) -> None:
        limits = dict(self._limits)
        if declare(transaction, limits) and within is not None:
            self._adding.add(within)
        if within not in self._adding:
            self.knows(self._id, limits=limits)

    def _number(self, connection: Connection) -> int:
        transaction = connection.get_transaction()
        found = find_queue(connection, self._name)
        if not found:
            if transaction is not None:
                self._adding.add(transaction)
            return add_queue(connection, self._name)
        if transaction not in self._adding:
            self._id = found
        return found


def _named(connection: Executor, name: str) -> dict[str, str]:
    return {"name": encode_text(name) if connection.dialect.name == "postgresql" else name}


_ADMITTED: Final = text(
    """
    SELECT current_setting('max_connections')::int,
           current_setting('superuser_reserved_connections')::int
           + coalesce(current_setting('reserved_connections', true)::int, 0),
           (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user),
           (SELECT nullif(datconnlimit, -1) FROM pg_database WHERE datname = current_database())
    """
)


def admission(connection: Executor) -> Admission:
    """Ask the PostgreSQL server of this connection."""
    maximum, reserved, role, database = connection.execute(_ADMITTED).one()
    return Admission(maximum=maximum, reserved=reserved, limit=min(filter(None, (role, database)), default=None))
