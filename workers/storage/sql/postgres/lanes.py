"""A few connections to a PostgreSQL database, each for one step at a time, in a thread or in the event loop.

Theory of operation. To a short statement the switches to a thread and back cost more than the statement. So it is sent
and read in the event loop that wants it. Threads are for what may take long by itself, and for what finds no connection
free. Only they open connections. A connection belongs to no event loop: the next step on it may be another's.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from workers.storage.sql.caller import translated
from workers.storage.sql.database import Begin, Step
from workers.storage.sql.postgres.asking import Asking, run_blocking
from workers.storage.sql.postgres.direct import PostgresDirect
from workers.storage.sql.postgres.looped import LoopStep
from workers.storage.sql.rows import Transaction

T = TypeVar("T")

_LOOKS_SECONDS: Final = 1.0
"""How often a thread that waits for a connection looks for one that an event loop has left behind."""


class Lanes:
    """At most `count` connections of `engine`, which does not pool them, to what errors call `database`.

    What runs on them raises `StorageUnavailable` or `StorageError` where the database does not answer, or refuses.
    """

    def __init__(self, engine: Engine, database: str, count: int, threads: str) -> None:
        self._engine = engine
        self._database = database
        self._threads = ThreadPoolExecutor(count, threads)
        self._aside = ThreadPoolExecutor(count, f"{threads}-aside")  # the others may all wait for who waits for these
        self._count = count
        self._changed = threading.Condition()
        self._free: list[Connection] = []
        self._in_use = 0
        self._is_closed = False
        self._steps: dict[LoopStep[Any], Connection] = {}  # of any results

    def submit(self, run: Callable[[Connection], T]) -> Future[T]:
        """Run it in a thread.

        Raises:
            RuntimeError: these were closed.
        """
        return self._threads.submit(self._in_thread, run)

    def step(self, begin: Begin, ask: Callable[[Transaction], Asking[T]]) -> Step[T]:
        """Carry out what it asks for, each a transaction of its own: in the running event loop or, without, a thread.

        Raises:
            RuntimeError: these were closed.
        """
        connection = self._take_now() if _is_in_loop() else None
        if connection is None:
            return self.submit(partial(self.carry_out, begin, ask))
        step: LoopStep[T] = LoopStep(self._database, self._aside, self._end)
        self._steps[step] = connection
        direct = PostgresDirect(connection, alone=True)
        transaction = begin(direct)
        step.start(direct, transaction, ask(transaction))
        return step

    @staticmethod
    def carry_out(begin: Begin, ask: Callable[[Transaction], Asking[T]], connection: Connection) -> T:
        """Carry out in this thread, blocking, what `step` would."""
        transaction = begin(PostgresDirect(connection, alone=True))
        return run_blocking(transaction, ask(transaction))

    def close(self, patience: timedelta) -> None:
        """Close the connections; what an event loop has not ended after `patience` loses its own."""
        self._threads.shutdown()
        with self._changed:
            self._changed.wait_for(lambda: not self._in_use, patience.total_seconds())
            self._is_closed = True
            free, self._free = self._free, []
        self._aside.shutdown()
        for connection in free:
            connection.close()

    def _in_thread(self, run: Callable[[Connection], T]) -> T:
        with translated(self._database):
            connection = self._take()
            try:
                return run(connection)
            finally:
                self._give_back(connection)

    def _end(self, step: LoopStep[Any]) -> None:  # of any result
        connection = self._steps.pop(step, None)
        if connection is not None:
            self._give_back(connection)

    def _end_abandoned(self) -> None:
        """Give up the connections of steps whose event loop has ended before them."""
        for step in list(self._steps):
            if step.loop.is_closed() and not step.is_aside:
                connection = self._steps.pop(step, None)
                if connection is not None:
                    connection.invalidate()
                    self._give_back(connection)

    def _take_now(self) -> Connection | None:
        with self._changed:
            if not self._free or not _is_open(self._free[-1]):
                return None
            self._in_use += 1
            return self._free.pop()

    def _take(self) -> Connection:
        connection = self._next()
        if connection is not None:
            if _is_open(connection):
                return connection
            connection.close()
        try:
            return self._engine.connect()
        except BaseException:
            self._give_back(None)
            raise

    def _next(self) -> Connection | None:
        """Wait for a connection that is free, or None: one that is still to be opened."""
        while True:
            self._end_abandoned()
            with self._changed:
                if self._changed.wait_for(lambda: self._in_use < self._count, _LOOKS_SECONDS):
                    self._in_use += 1
                    return self._free.pop() if self._free else None

    def _give_back(self, connection: Connection | None) -> None:
        if connection is not None:
            _end_transaction(connection)
        with self._changed:
            self._in_use -= 1
            is_kept = connection is not None and not self._is_closed and not connection.invalidated
            if connection is not None and is_kept:
                self._free.append(connection)
            self._changed.notify()
        if connection is not None and not is_kept:
            connection.close()


def _is_in_loop() -> bool:
    """Tell whether an event loop runs in this thread that can watch sockets; the one of Windows cannot."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return os.name == "posix"


def _end_transaction(connection: Connection) -> None:
    """End what SQLAlchemy has begun by itself, if a statement went through it."""
    try:
        connection.rollback()
    except SQLAlchemyError:
        connection.invalidate()


def _is_open(connection: Connection) -> bool:
    """Tell whether the server has left a connection open that nobody uses.

    It has not when something unasked has arrived: PostgreSQL was restarted, or closed it.
    """
    driver: object = connection.connection.dbapi_connection
    assert isinstance(driver, psycopg.Connection)
    if driver.closed:
        return False
    poll = select.poll()
    poll.register(driver.fileno(), select.POLLIN)
    return not poll.poll(0)
