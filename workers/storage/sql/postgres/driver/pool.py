"""A few connections to a PostgreSQL database, for steps in threads and in event loops.

Theory of operation. To a short statement the switches to a thread and back cost more than the statement. So it is sent
and read in the event loop that wants it. Threads are for what may take long by itself, and for what finds no connection
free. Only they open connections. A connection belongs to no event loop: the next step on it may be another's. An event
loop may be blocked by a handler, and even by one that waits for a thread here. So one connection is left to threads.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from psycopg import pq
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from workers.errors import StorageUnavailable
from workers.storage.sql.caller import translated
from workers.storage.sql.database import Begin, Step
from workers.storage.sql.postgres.driver.direct import PostgresDirect, driver_of, give_up
from workers.storage.sql.postgres.driver.loop_step import Asking, LoopStep, run_blocking
from workers.storage.sql.postgres.driver.silence import Patience
from workers.storage.sql.rows import Transaction

T = TypeVar("T")

_LOOKS_SECONDS: Final = 1.0
"""How often a thread that waits for a connection looks for one that an event loop has left behind."""


class StepPool:
    """At most `count` connections of `engine`, which does not pool them, to what errors call `database`.

    Each is for one step at a time. What runs on them raises `StorageUnavailable` where the database does not answer, or
    these were closed, and `StorageError` where it refuses. `silence` is how long the server may take over a step while
    nothing is heard of it, by default as long as the `patience` says.
    """

    def __init__(self, engine: Engine, database: str, count: int, threads: str, patience: Patience) -> None:
        self._engine = engine
        self._database = database
        self._patience = patience
        self._submitted: set[Future[Any]] = set()  # of any results
        self._threads = ThreadPoolExecutor(count, threads)
        self._aside = ThreadPoolExecutor(count, f"{threads}-aside")  # the others may all wait for who waits for these
        self._count = count
        self._changed = threading.Condition()
        self._free: list[Connection] = []
        self._in_use = 0
        self._is_closed = False
        self._steps: dict[LoopStep[Any], Connection] = {}  # of any results

    def submit(self, run: Callable[[Connection], T], silence: timedelta | None = None) -> Future[T]:
        """Run it in a thread.

        Raises:
            StorageUnavailable: these were closed.
        """
        try:
            submitted = self._threads.submit(self._in_thread, run, silence, time.monotonic())
        except RuntimeError:
            raise self._disconnected() from None
        self._submitted.add(submitted)
        submitted.add_done_callback(self._submitted.discard)
        return submitted

    def step(self, begin: Begin, ask: Callable[[Transaction], Asking[T]], silence: timedelta | None = None) -> Step[T]:
        """Carry out what it asks for, in the running event loop if there is one; each statement is a transaction.

        Raises:
            StorageUnavailable: these were closed.
        """
        step: LoopStep[T] | None = LoopStep(self._database, self._aside, self._end) if _is_in_loop() else None
        connection = None if step is None else self._take_for(step)
        if step is None or connection is None:
            return self.submit(partial(self.carry_out, begin, ask), silence)
        try:
            driver_of(connection).silence = silence or self._patience.limit
            direct = PostgresDirect(connection, alone=True)
            transaction = begin(direct)
            step.start(direct, transaction, ask(transaction))
        except BaseException:
            self._end(step)
            raise
        return step

    @staticmethod
    def carry_out(begin: Begin, ask: Callable[[Transaction], Asking[T]], connection: Connection) -> T:
        """Carry out in this thread, blocking, what `step` would."""
        transaction = begin(PostgresDirect(connection, alone=True))
        return run_blocking(transaction, ask(transaction))

    @property
    def is_open(self) -> bool:
        """Whether it has a connection, or is about to have one."""
        with self._changed:
            return bool(self._in_use or self._free or self._submitted)

    def distrust(self) -> None:
        """Close the connections that nobody uses: another one to the same server has gone silent."""
        with self._changed:
            free, self._free = self._free, []
        for connection in free:
            give_up(connection)
            connection.close()

    def close(self, until: float) -> None:
        """Close the connections, those in use when they are given back; wait for these until then.

        Their threads are left alone: the patience with the server ends what they do.
        """
        with self._changed:
            self._is_closed = True
        self.distrust()
        self._threads.shutdown(wait=False)
        wait(set(self._submitted), max(until - time.monotonic(), 0))
        self._end_abandoned()
        with self._changed:
            self._changed.wait_for(lambda: not self._in_use, max(until - time.monotonic(), 0))
        self._aside.shutdown(wait=False)

    def _in_thread(self, run: Callable[[Connection], T], silence: timedelta | None, asked: float) -> T:
        with translated(self._database):
            connection = self._take(asked)
            try:
                driver_of(connection).silence = silence or self._patience.limit
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
                    give_up(connection)
                    self._give_back(connection)

    def _take_for(self, step: LoopStep[Any]) -> Connection | None:  # of any result
        """Return a connection for a step in an event loop, if one is open and free."""
        with self._changed:
            if len(self._steps) >= self._count - 1 or not self._free or not _is_open(self._free[-1]):
                return None
            self._in_use += 1
            connection = self._steps[step] = self._free.pop()
            return connection

    def _take(self, asked: float) -> Connection:
        connection = self._next(asked)
        try:
            if connection is not None:
                if _is_open(connection):
                    return connection
                connection.close()
            return self._opened()
        except BaseException:
            self._give_back(None)
            raise

    def _opened(self) -> Connection:
        """Open a connection that belongs to no pool, which would close a fork's copy, and so the parent's session."""
        connection = self._engine.connect()
        connection.detach()
        return connection

    def _next(self, asked: float) -> Connection | None:
        """Wait for a connection that is free, or None: one that is still to be opened.

        Raises:
            StorageUnavailable: these were closed too long ago, or the server has gone silent since that time.
        """
        while True:
            if self._patience.is_over:
                raise self._disconnected()
            if self._patience.was_lost(asked):
                raise StorageUnavailable(f"{self._database} does not answer")
            self._end_abandoned()
            with self._changed:
                if self._changed.wait_for(lambda: self._in_use < self._count, _LOOKS_SECONDS):
                    self._in_use += 1
                    return self._free.pop() if self._free else None

    def _disconnected(self) -> StorageUnavailable:
        return StorageUnavailable(f"{self._database} was disconnected")

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
    """End what SQLAlchemy has begun by itself, if a statement went through it; give up what is not idle then."""
    try:
        connection.rollback()
        if connection.invalidated or driver_of(connection).info.transaction_status is pq.TransactionStatus.IDLE:
            return
    except SQLAlchemyError:
        pass
    give_up(connection)


def _is_open(connection: Connection) -> bool:
    """Tell whether the server has left a connection open that nobody uses.

    It has not when something unasked has arrived: PostgreSQL was restarted, or closed it.
    """
    driver = driver_of(connection)
    if driver.closed:
        return False
    poll = select.poll()
    poll.register(driver.fileno(), select.POLLIN)
    return not poll.poll(0)
