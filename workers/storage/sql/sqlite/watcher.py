"""The thread that reads an SQLite file, and between its tasks looks for what others have committed to it."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from sqlalchemy import Connection

from workers.storage.sql.sqlite import pace
from workers.storage.sql.sqlite.inotify import Ear
from workers.storage.sql.sqlite.pace import LookPace, Sight
from workers.storage.sql.sqlite.thread import SqliteThread, Task

_LOG: Final = logging.getLogger(__name__)


class SqliteWatcher(SqliteThread):
    """Calls `look` soon after each write to the file's log for as long as anything is `wanted`.

    Theory of operation. A commit is a write to the write-ahead log, the file `<path>-wal`, of which `inotify` tells.
    `LookPace` says how a look follows it. Where the system has no inotify, or has no more of it to give, a look comes
    every 50 ms, and every second the watcher tries anew. Once a second it looks unasked. If there is something of which
    no write was heard, inotify is not to be relied on here: until a write is heard, the looks come every 50 ms again.
    """

    def __init__(
        self,
        name: str,
        database: str,
        connect: Callable[[], Connection],
        *,
        path: str,
        look: Callable[[Connection], Sight],
        wanted: Callable[[], bool],
    ) -> None:
        self._log_path = f"{path}-wal"
        self._look = look
        self._wanted = wanted
        self._pace = LookPace()
        self._ear: Ear | None = None
        self._relies = True  # on the ear
        self._watched_until = 0.0
        self._asleep = False
        self._failed = False
        super().__init__(name, database, connect)

    def find(self) -> None:
        """Say that the last look was worth it; to be called in this thread."""
        self._pace.find()

    def stop(self) -> Future[None]:
        stopped = super().stop()
        if self._of_another_process:
            self._forget_ear()  # a fork's copies of its descriptors
        return stopped

    def _next(self) -> Task | None:
        if not self._wanted():
            return self._tasks.get()
        if self._pace.left(time.monotonic()) <= 0:
            return self._look_now
        try:
            return self._take()
        except queue.Empty:
            return _nothing

    def _take(self) -> Task | None:
        """Return the next task.

        Raises:
            queue.Empty: it may be time for a look.
        """
        now = time.monotonic()
        if self._ear is None:
            return self._tasks.get(timeout=max(self._pace.left(now), 0))
        closed = self._pace.closed(now)
        self._asleep = True  # from here on, whoever adds a task rings
        left = self._pace.left(now)
        seconds = 0 if not self._tasks.empty() else min(closed, left) if closed > 0 else left
        heard = self._ear.wait(seconds, only_bell=closed > 0)
        self._asleep = False
        if heard:
            self._pace.hear()
        return self._tasks.get_nowait()

    def _put(self, task: Task | None) -> None:
        super()._put(task)
        if self._asleep and self._ear is not None:
            self._ear.ring()

    def _look_now(self) -> None:
        try:
            heard, seen = self._with_connection(self._listen_and_look)
        except Exception as error:  # whatever it is, the thread must live: others wait for their tasks
            if not self._failed:
                _LOG.warning("cannot watch %s for others' commits: %s", self._database, error)
            self._failed = True
            self._pace.poll(time.monotonic())
            return
        self._failed = False
        if self._ear is None:
            self._pace.poll(time.monotonic())
            return
        if heard:
            self._relies = True
        elif seen is not Sight.NOTHING and self._pace.rests:
            self._relies = False
        self._pace.looked(time.monotonic(), seen, heard=heard, rest=pace.REST if self._relies else pace.POLL)

    def _listen_and_look(self, connection: Connection) -> tuple[bool, Sight]:
        # The file is watched before the look: what is committed after the look is heard.
        if time.monotonic() >= self._watched_until:
            self._watch()
        heard = self._ear is not None and self._ear.drain()
        return heard, self._look(connection)

    def _watch(self) -> None:
        """Watch the log that is there now, which may be another one than a second ago."""
        self._watched_until = time.monotonic() + pace.REST.total_seconds()
        try:
            if self._ear is None:
                self._ear = Ear(self._log_path)
            self._ear.watch()
        except OSError as error:
            _LOG.debug("%s is looked at every %s: %s", self._database, pace.POLL, error)
            self._forget_ear()

    def _forget_ear(self) -> None:
        with self._lock:  # so that nobody rings a descriptor that is another's by then
            ear, self._ear = self._ear, None
        if ear is not None:
            ear.close()

    def _close(self) -> None:
        super()._close()
        self._watched_until = 0.0  # the next connection may have another log

    def _end(self) -> None:
        super()._end()
        self._forget_ear()


def _nothing() -> None:
    """Do nothing, in place of a task."""
