"""What joins a caller's transaction, without being connected; from plain code also without an event loop.

Theory of operation. Everything is written over the caller's connection, even the registration of the queue and its
limits: a connection of our own would wait for the lock that the caller holds. So the queue's number is read there as
well. It is remembered, unless the same transaction assigned it, because that may be rolled back; so it is with limits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, RootTransaction, text

from workers.gates import Limit
from workers.homes import ForkLock
from workers.jobs import EnqueueResult, NewJob, Settlement, SettleOutcome
from workers.storage.sql import gates, schema
from workers.storage.sql.caller import Caller
from workers.storage.sql.database import Database
from workers.storage.sql.direct import Executor, plain
from workers.storage.sql.rows import Transaction, encode_text

T = TypeVar("T")

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

    def _begin(self, connection: Executor) -> Transaction:
        queue = self._id or self._number(plain(connection))
        transaction = Transaction(connection=connection, queue=queue, clock=self._clock)
        if self._limits:
            self._declare(transaction, plain(connection).get_transaction())
        return transaction

    def _declare(self, transaction: Transaction, within: RootTransaction | None) -> None:
        limits = dict(self._limits)
        if gates.declare(transaction, limits) and within is not None:
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
