"""The directory of one queue: made when missing, locked by one process at a time, cleared of foreign files.

What the operating system refuses is translated here, by its number.

The lock is `flock` on the directory itself, and every path is taken relative to it: whoever holds the lock of a
directory sees the files of that very directory, even if somebody deleted it and made another one of its name. The
kernel gives the lock back when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import random
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

from workers.errors import StorageError, StorageUnavailable, WorkersError

JOURNAL: Final = "journal"
NEW_JOURNAL: Final = "journal.new"
QUARANTINE: Final = "quarantine"
MOST_SET_ASIDE: Final = 100
"""The number of files in quarantine from which copies of torn ends are no longer made."""

_PLAIN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_PAUSE: Final = (0.000_2, 0.002)
_LOG = logging.getLogger(__name__)


def directory_of(root: Path, queue: str) -> Path:
    """Return where the queue is kept: under its own name if that is a plain one, else under a digest of it."""
    if _PLAIN_NAME.fullmatch(queue):
        return root / queue
    return root / f"~{hashlib.sha256(queue.encode()).hexdigest()}"


class QueueDirectory:
    """The opened directory, for one thread."""

    def __init__(self, path: Path, *, sync: bool, busy_timeout: timedelta) -> None:
        self.path = path
        self._sync = sync
        self._busy_timeout = busy_timeout
        _make(path, sync=sync)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock: no other process, and no other thread, is inside this block.

        Raises:
            StorageUnavailable: another process held the lock for longer than the timeout.
        """
        deadline = time.monotonic() + self._busy_timeout.total_seconds()
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StorageUnavailable(
                        f"{self.path}: another process held the lock for {self._busy_timeout}; is one stopped?"
                    ) from None
            # Polled, because a blocking flock has no timeout and a stopped process keeps its locks.
            time.sleep(random.uniform(*_PAUSE))  # noqa: S311 - spreads retries, protects nothing
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def open(self, name: str, flags: int) -> int:
        """Open the file and return its descriptor; links are not followed, and a pipe blocks nobody."""
        common = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags | common, 0o600, dir_fd=self._descriptor)

    def replace(self, old: str, new: str) -> None:
        """Rename `old` to `new`, durably."""
        os.rename(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        self.synchronise()

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def synchronise(self) -> None:
        """Make what the directory lists survive a crash of the machine."""
        if self._sync:
            os.fsync(self._descriptor)

    # What is not ours

    def clear(self) -> None:
        """Move everything that is not ours to quarantine, and report it."""
        with suppress(IsADirectoryError, PermissionError):
            self.remove(NEW_JOURNAL)  # left by an unfinished compaction
        for name in sorted(os.listdir(self._descriptor)):
            if name == QUARANTINE:
                continue
            if name != JOURNAL:
                self._move_away(name)
            elif not stat.S_ISREG(self.stat(name).st_mode):
                self.set_aside(name, "not a regular file")

    def _move_away(self, name: str) -> None:
        try:
            self.set_aside(name, "not a file of this queue")
        except OSError as error:  # it harms nobody where it is
            _LOG.warning("%s: cannot set aside %r: %s", self.path, name, error)

    def set_aside(self, name: str, reason: str) -> None:
        """Move the file to quarantine, beside a text that says why."""
        place = self._quarantine(name, reason)
        os.rename(name, place, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        _LOG.error("%s: set aside %r as %s: %s", self.path, name, place, reason)

    def keep_copy(self, descriptor: int, start: int, end: int, reason: str) -> None:
        """Copy these bytes of the journal to quarantine, unless that or the disk is full."""
        _LOG.error("%s: bytes %d to %d of the journal are void: %s", self.path, start, end, reason)
        try:
            if len(os.listdir(self._made_quarantine())) >= MOST_SET_ASIDE:
                return
            target = self.open(self._quarantine(f"journal-{start}-{end}", reason), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                while start < end and (chunk := os.pread(descriptor, min(end - start, 1 << 20), start)):
                    start += os.write(target, chunk)
            finally:
                os.close(target)
        except OSError as error:
            _LOG.warning("%s: no copy of them could be made: %s", self.path, error)

    def _quarantine(self, name: str, reason: str) -> str:
        """Return a free path in quarantine for `name`, and write the reason beside it."""
        self._made_quarantine()
        place = f"{QUARANTINE}/{time.time_ns()}-{name[:40]}"
        with suppress(OSError):  # a full disk; the log has it
            descriptor = self.open(f"{place}.reason.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                os.write(descriptor, f"{reason}\n".encode())
            finally:
                os.close(descriptor)
        return place

    def _made_quarantine(self) -> Path:
        try:
            os.mkdir(QUARANTINE, 0o700, dir_fd=self._descriptor)
        except FileExistsError:
            if not stat.S_ISDIR(self.stat(QUARANTINE).st_mode):
                os.rename(
                    QUARANTINE, f"no-{QUARANTINE}", src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor
                )  # found and set aside when the directory is next cleared
                os.mkdir(QUARANTINE, 0o700, dir_fd=self._descriptor)
        return self.path / QUARANTINE


def _make(path: Path, *, sync: bool) -> None:
    """Create the directory and its parents where they are missing, accessible to this user alone."""
    if path.is_dir():
        return
    _make(path.parent, sync=sync)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if sync:
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_ADVICE: Final = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file may not grow any more; raise the limit of file sizes",
    errno.EROFS: "the file system is read-only; mount it writable",
    errno.EACCES: "permission denied; the directory must belong to this process's user",
    errno.EPERM: "permission denied; the directory must belong to this process's user",
    errno.ENOENT: "it was deleted while in use; connect again",
    errno.ESTALE: "it was deleted while in use; connect again",
    errno.ENOTDIR: "a part of its path is a file; name another directory",
    errno.ENAMETOOLONG: "its path is too long; name another directory",
    errno.ELOOP: "its path goes in circles; name another directory",
}

_LASTING: Final = frozenset(_ADVICE) - {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Waiting does not cure these; it may cure a full disk, and anything unknown."""


def translate(error: OSError, place: str) -> WorkersError:
    """Translate the error by its number: what is wrong with `place`, and what to do."""
    code = error.errno or 0
    message = f"{place}: {_ADVICE.get(code, os.strerror(code) if code else str(error))}"
    return StorageError(message) if code in _LASTING else StorageUnavailable(message)
