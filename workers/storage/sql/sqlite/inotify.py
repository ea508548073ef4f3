"""Writes to a file as Linux tells of them, by `inotify`, which Python's library does not have."""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from typing import Final

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
