"""The thread that reads an SQLite file, and between its tasks looks for what others have committed to it."""

from __future__ import annotations

import errno
import logging
import math
import os
import queue
import select
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from enum import Enum, auto
from typing import Final

from sqlalchemy import Connection

from workers.storage.sql.sqlite.driver.thread import SqliteThread, Task

POLL: Final = timedelta(milliseconds=50)
"""How long after a look the next one follows where nothing is heard of writes."""

REST: Final = timedelta(seconds=1)
"""And where they are heard of, when there was none."""

LINGER: Final = timedelta(seconds=1)
"""For how long after a write the looks stay as close as without it, before the rest."""

SOON_SECONDS: Final = 0.0001
"""After a look that heard the first write after a pause, and saw nothing: the commit is about to become visible."""

PAUSE_SECONDS: Final = 0.002
"""Longer than between the looks at a transaction that writes all the time, so that only its first is followed soon."""

CLOSEST_SECONDS: Final = 0.001
CLOSEST_WHILE_WE_WRITE_SECONDS: Final = 0.004


class Sight(Enum):
    """What a look has seen."""

    NOTHING = auto()
    """Nobody has committed anything."""
    OURS = auto()
    """Only this process has, and those who wait here were told by the step itself."""
    UNSURE = auto()
    """Somebody has, and whether anybody else has can be told in a moment."""
    OTHERS = auto()
    """Others have, and those who wait here were told to look."""
    NEWS = auto()
    """Others have, and somebody here had asked for it."""


class LookPace:
    """When to look next; all times are seconds, of the monotonic clock.

    Theory of operation. The first write after a pause causes a look at once. SQLite writes to its log before it makes
    the commit visible, through shared memory, of which nobody is told; in between it may synchronise the disk, or wait
    for a processor. So further looks follow the one that heard a write, at twice the distance each time up to 50 ms,
    until a second has gone by. After a pause the first of them follows after 0.1 ms. Otherwise a look never comes
    sooner than `closest` after the last one. That is 1 ms, and doubles with each look that woke somebody in vain, so
    that a busy writer of another queue in the file costs a waiter no more than 20 looks a second. It also doubles, up
    to 4 ms, with each look that found our own commits.
    """

    def __init__(self) -> None:
        self._looked = -math.inf
        self._stirred = -math.inf  # when there was last something to see or hear
        self._closest = CLOSEST_SECONDS
        self._gap = CLOSEST_SECONDS

    def left(self, now: float) -> float:
        """Return how long until the next look."""
        return self._looked + self._gap - now

    def closed(self, now: float) -> float:
        """Return for how long no write can cause a look."""
        return self._looked + self._closest - now

    @property
    def rests(self) -> bool:
        """Whether nothing has happened for a while."""
        return self._gap > POLL.total_seconds()

    def hear(self) -> None:
        """Look as soon as possible."""
        self._gap = min(self._gap, self._closest)

    def find(self) -> None:
        """Take the last look for one that was worth it."""
        self._closest = CLOSEST_SECONDS

    def poll(self, now: float) -> None:
        """Note a look where no writes are heard."""
        self._looked, self._closest, self._gap = now, CLOSEST_SECONDS, POLL.total_seconds()

    def looked(self, now: float, seen: Sight, *, heard: bool, rest: timedelta) -> None:
        """Note a look, whether a write had been heard before it, and how long to rest when nothing happens any more."""
        poll = POLL.total_seconds()
        if seen is Sight.OTHERS:
            self._closest = min(2 * self._closest, poll)
        elif seen is Sight.OURS:
            self._closest = max(self._closest, min(2 * self._closest, CLOSEST_WHILE_WE_WRITE_SECONDS))
        elif seen is Sight.NEWS:
            self._closest = CLOSEST_SECONDS
        elif seen is Sight.NOTHING:
            self._closest = max(self._closest / 2, CLOSEST_SECONDS)
        again = 2 * self._gap
        if heard or seen is not Sight.NOTHING:
            is_first = now - self._stirred > PAUSE_SECONDS and self._closest == CLOSEST_SECONDS
            again = SOON_SECONDS if seen is Sight.NOTHING and is_first else self._closest
            self._stirred = now
        lingers = now - self._stirred < LINGER.total_seconds()
        self._gap = again if again <= poll else poll if lingers else rest.total_seconds()
        self._looked = now


_WRITTEN: Final = 0x2  # IN_MODIFY of <sys/inotify.h>
_READ_BYTES: Final = 4096


class Ear:
    """Hears in one thread that a file was written to, and in the same wait a bell, which any thread may ring.

    The kernel keeps one event of many equal ones, so what nobody reads does not grow. No descriptor of the file is
    opened: closing one would release the locks that SQLite has on that file.

    Raises:
        OSError: there is no inotify here, or the user or this process has no more of it.
    """

    def __init__(self, path: str) -> None:
        if sys.platform != "linux" or not hasattr(os, "eventfd"):
            raise OSError(errno.ENOSYS, "this system or this Python has no inotify or no eventfd")
        try:
            import ctypes
        except ImportError:
            raise OSError(errno.ENOSYS, "this Python was built without ctypes") from None
        self._path = os.fsencode(path)
        self._library = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno
        self._watched: int | None = None
        self._inotify = self._checked(self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            os.close(self._inotify)
            raise
        self._only_bell = select.poll()
        self._only_bell.register(self._bell, select.POLLIN)
        self._both = select.poll()
        self._both.register(self._bell, select.POLLIN)
        self._both.register(self._inotify, select.POLLIN)

    def watch(self) -> None:
        """Hear of writes to the file that is at the path now, and no longer of those to one that was there before.

        Raises:
            OSError: it is not there, or the user may watch no more files.
        """
        found = self._checked(self._library.inotify_add_watch(self._inotify, self._path, _WRITTEN))
        if self._watched not in (None, found):
            self._library.inotify_rm_watch(self._inotify, self._watched)  # fails if that file is gone
        self._watched = found

    def wait(self, seconds: float, *, only_bell: bool) -> bool:
        """Wait for a write or the bell, and tell whether it was a write; with `only_bell`, of writes nothing is heard.

        It may return up to a millisecond early, and hears the bell up to a millisecond late if the wait is as short. A
        write is heard again and again until `drain`.
        """
        poll = self._only_bell if only_bell else self._both
        whole_ms, rest_ms = divmod(max(seconds, 0) * 1000, 1)  # `poll` rounds up
        if rest_ms and not whole_ms:
            time.sleep(rest_ms / 1000)
        ready = [descriptor for descriptor, _ in poll.poll(whole_ms)]
        if self._bell in ready:
            os.eventfd_read(self._bell)
        return self._inotify in ready

    def drain(self) -> bool:
        """Forget the writes so far, and tell whether there were any."""
        try:
            return bool(os.read(self._inotify, _READ_BYTES))
        except BlockingIOError:
            return False

    def ring(self) -> None:
        """End the wait, or the next one; from any thread."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        os.close(self._inotify)
        os.close(self._bell)

    def _checked(self, result: int) -> int:
        if result < 0:
            code = self._errno()
            raise OSError(code, os.strerror(code))
        return result


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
        self._pace.looked(time.monotonic(), seen, heard=heard, rest=REST if self._relies else POLL)

    def _listen_and_look(self, connection: Connection) -> tuple[bool, Sight]:
        # The file is watched before the look: what is committed after the look is heard.
        if time.monotonic() >= self._watched_until:
            self._watch()
        heard = self._ear is not None and self._ear.drain()
        return heard, self._look(connection)

    def _watch(self) -> None:
        """Watch the log that is there now, which may be another one than a second ago."""
        self._watched_until = time.monotonic() + REST.total_seconds()
        try:
            if self._ear is None:
                self._ear = Ear(self._log_path)
            self._ear.watch()
        except OSError as error:
            _LOG.debug("%s is looked at every %s: %s", self._database, POLL, error)
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
