"""A thread with a connection to an SQLite file, which does its tasks in order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from workers.errors import StorageError, StorageUnavailable
from workers.homes import ForkLock
from workers.storage.sql.errors import is_busy, translate

T = TypeVar("T")

Task: TypeAlias = Callable[[], None]


class AtWork(Exception):
    """The thread has its connection in use."""


class SqliteThread:
    """One thread with one connection, which does its tasks in order; it connects when first needed."""

    def __init__(self, name: str, database: str, connect: Callable[[], Connection]) -> None:
        self._database = database
        self._connect = connect
        self._connection: Connection | None = None
        self._in_use = threading.Lock()  # held by whoever uses the connection
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = ForkLock()
        self._stopped: Future[None] | None = None
        self._process = os.getpid()
        # A daemon, so that a program that forgot to disconnect can end; that does SQLite no harm.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Connection], T]) -> Future[T]:
        """Return the future of `work`'s result; database errors arrive translated, everything else as it is."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = self._with_connection(work)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if self._of_another_process:
            raise StorageError(f"{self._database} was opened before this process was forked; connect again")
        with self._lock:
            if self._stopped is None:
                self._put(run)
                return future
        raise StorageUnavailable(f"{self._database} was disconnected")

    def stop(self) -> Future[None]:
        """Return a future that is done when all tasks are done and the connection is closed."""
        with self._lock:
            if self._stopped is None:
                self._stopped = Future()
                self._stopped.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel this future
                if self._of_another_process:
                    self._stopped.set_result(None)  # the connection is left alone: it is the parent's
                else:
                    self._put(None)
            return self._stopped

    @property
    def _of_another_process(self) -> bool:
        """Whether this is a fork's copy. It has no thread, so waiting for one would never end."""
        return self._process != os.getpid()

    def peek(self, work: Callable[[Connection], T]) -> T | None:
        """Return `work`'s result on this thread's connection, done at once in the calling thread; None without one.

        Raises:
            AtWork: the thread uses it.
        """
        if not self._in_use.acquire(blocking=False):
            raise AtWork
        try:
            return None if self._connection is None else work(self._connection)
        finally:
            self._in_use.release()

    def _run(self) -> None:
        while self._step():
            pass
        self._end()
        assert self._stopped is not None, "only stop() ends the thread"
        self._stopped.set_result(None)

    def _step(self) -> bool:
        # A method of its own, so that an idle thread keeps no reference to its last task.
        task = self._next()
        if task is None:
            return False
        task()
        return True

    def _next(self) -> Task | None:
        """Wait for the next task, None for the end."""
        return self._tasks.get()

    def _put(self, task: Task | None) -> None:
        """Add a task; called with the lock."""
        self._tasks.put(task)

    def _end(self) -> None:
        """Give back what the thread holds, as the last thing that it does."""
        with self._in_use:
            self._close()

    def _with_connection(self, work: Callable[[Connection], T]) -> T:
        with self._in_use:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                return work(self._connection)
            except DBAPIError as error:
                if not is_busy(error):
                    self._close()
                raise translate(error, self._database) from error
            finally:
                if self._connection is not None:
                    self._connection.rollback()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
