"""A thread with a connection to an SQLite file, which does its tasks in order."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Final, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from workers.errors import StorageError, StorageUnavailable
from workers.storage.sql.errors import is_busy, translate

T = TypeVar("T")

POLL: Final = timedelta(milliseconds=50)
_LOG = logging.getLogger(__name__)


class SqliteThread:
    """One thread with one connection, which does its tasks in order; it connects when first needed.

    `tick` is called about every 50 ms for as long as `ticking()` is true.
    """

    def __init__(
        self,
        name: str,
        database: str,
        connect: Callable[[], Connection],
        *,
        tick: Callable[[Connection], None] | None = None,
        ticking: Callable[[], bool] = lambda: False,
    ) -> None:
        self._database = database
        self._connect = connect
        self._connection: Connection | None = None
        self._tick = tick
        self._ticking = ticking
        self._ticked = 0.0
        self._tick_failed = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
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
                self._tasks.put(run)
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
                    self._tasks.put(None)
            return self._stopped

    @property
    def _of_another_process(self) -> bool:
        """Whether this is a fork's copy. It has no thread, so waiting for one would never end."""
        return self._process != os.getpid()

    def _run(self) -> None:
        while self._step():
            pass
        self._close()
        assert self._stopped is not None, "only stop() ends the thread"
        self._stopped.set_result(None)

    def _step(self) -> bool:
        # A method of its own, so that an idle thread keeps no reference to its last task.
        poll = POLL.total_seconds()
        timeout = poll if self._tick is not None and self._ticking() else None
        try:
            task = self._tasks.get(timeout=timeout)
        except queue.Empty:
            pass
        else:
            if task is None:
                return False
            task()
        if timeout is not None and time.monotonic() - self._ticked >= poll:
            self._do_tick()
        return True

    def _do_tick(self) -> None:
        assert self._tick is not None
        try:
            self._with_connection(self._tick)
        except Exception as error:  # whatever it is, the thread must live: others wait for their tasks
            if not self._tick_failed:
                _LOG.warning("cannot watch %s for others' commits: %s", self._database, error)
            self._tick_failed = True
        else:
            self._tick_failed = False
        self._ticked = time.monotonic()

    def _with_connection(self, work: Callable[[Connection], T]) -> T:
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
