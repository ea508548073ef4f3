"""The journal of one queue: read to its end, appended to, replaced by a snapshot of what it adds up to.

Every method except `changed` needs the directory's lock.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from workers.errors import StorageError
from workers.storage.file.directory import JOURNAL, NEW_JOURNAL, QueueDirectory
from workers.storage.file.frames import (
    NO_MARKER,
    PREAMBLE_BYTES,
    VERSION,
    Damage,
    Entry,
    Frame,
    OtherVersion,
    Preamble,
    encode,
    scan,
)

SLACK_BYTES: Final = 8 << 20
"""How much a journal may grow beyond twice its snapshot before it is compacted."""

Contents: TypeAlias = Iterable[tuple[Sequence[Entry], Sequence[bytes]]]

_sync: Final[Callable[[int], None]] = getattr(os, "fdatasync", os.fsync)


class Journal:
    """The file called `journal` in the directory, as far as it has been read."""

    def __init__(self, directory: QueueDirectory, *, sync: bool) -> None:
        self._directory = directory
        self._sync = sync
        self._descriptor: int | None = None
        self._preamble = Preamble()
        self._compact_beyond = 0
        self.position = 0
        """Where the next frame begins: everything before was read or written here."""
        self._unsynced = False

    @property
    def marker(self) -> bytes:
        """The bytes that tell this journal from every other."""
        return self._preamble.marker

    # Whether there is news

    def changed(self) -> bool:
        """Tell whether somebody else wrote something; without the lock, this is a hint."""
        found = self._directory.stat(JOURNAL)
        return not self._is_open_file(found) or found.st_size != self.position

    def exists(self) -> bool:
        """Tell whether there is a journal at all."""
        try:
            self._directory.stat(JOURNAL)
        except FileNotFoundError:
            return False
        return True

    def is_current(self) -> bool:
        """Tell whether the opened file is still the journal, and not shorter than what was read of it."""
        found = self._directory.stat(JOURNAL)
        return self._is_open_file(found) and found.st_size >= self.position

    def _is_open_file(self, found: os.stat_result) -> bool:
        if self._descriptor is None:
            return False
        opened = os.fstat(self._descriptor)
        return (opened.st_dev, opened.st_ino) == (found.st_dev, found.st_ino)

    # Opening

    def open(self, empty: Contents) -> None:
        """Open the file at its first frame. If it is missing, or foreign, a new one is made of `empty`.

        Raises:
            StorageError: another version wrote it.
        """
        self.close()
        self._directory.clear()
        try:
            self._descriptor = self._directory.open(JOURNAL, os.O_RDWR)
        except FileNotFoundError:
            self.replace(empty, continues=False)
        else:
            preamble = self._read_preamble(self._descriptor)
            if preamble is None:
                self.close()
                self._directory.set_aside(JOURNAL, "it does not begin as a journal does")
                self.replace(empty, continues=False)
            else:
                self._preamble = preamble
        self.position = PREAMBLE_BYTES
        # Its writer may have died before it was on the disk, and the process that renamed it may have died as well.
        self._unsynced = True
        self._directory.synchronise()

    def follow(self) -> bool:
        """Open the journal that replaced the opened one, where its snapshot ends.

        Returns False if it was not made of just this one. All of the opened one must have been read.
        """
        descriptor = self._directory.open(JOURNAL, os.O_RDWR)
        try:
            preamble = self._read_preamble(descriptor)
            if preamble is None or preamble.predecessor != self._preamble.marker:
                return False
            self.close()
            self._descriptor, descriptor = descriptor, -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._preamble = preamble
        self.position = preamble.snapshot_end
        self._unsynced = True
        self._directory.synchronise()
        return True

    def _read_preamble(self, descriptor: int) -> Preamble | None:
        try:
            return Preamble.decode(os.pread(descriptor, PREAMBLE_BYTES, 0))
        except OtherVersion as error:
            raise StorageError(
                f"{self._directory.path}: another version of this package wrote the journal (it is of version {error},"
                f" and this one reads {VERSION}); use that version, or another directory"
            ) from None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # Reading

    def news(self) -> Iterator[Frame | Damage]:
        """Yield what comes after `position`, which moves along; damage is skipped."""
        for found in scan(self._opened(), self._preamble.marker, self.position):
            self.position = found.end
            self._unsynced = True
            yield found

    def set_aside(self, damage: Damage, reason: str) -> None:
        """Copy the damaged bytes to quarantine."""
        self._directory.keep_copy(self._opened(), damage.start, damage.end, reason)

    def cut(self, end: int) -> None:
        """Truncate the journal at `end`."""
        os.ftruncate(self._opened(), end)
        self.position = end
        self._unsynced = True

    def settle(self) -> None:
        """Make what was read survive a crash of the machine: its writer may have died before it did that."""
        if self._unsynced and self._sync:
            _sync(self._opened())
        self._unsynced = False

    # Writing

    def encode(self, entries: Sequence[Entry], blobs: Sequence[bytes]) -> bytes:
        """Return a frame for this journal."""
        return encode(self._preamble.marker, entries, blobs)

    def append(self, frames: Sequence[bytes]) -> None:
        """Write the frames to the end of the journal, and to the disk; when this raises, none is in it."""
        descriptor, start = self._opened(), self.position
        try:
            self.position = _write(descriptor, b"".join(frames), start)
            if self._sync:
                _sync(descriptor)
        except BaseException:
            self.position = start
            # If even this fails, the next to take the lock finds a torn end, or steps that nobody was told of.
            with suppress(OSError):
                os.ftruncate(descriptor, start)
            raise
        self._unsynced = False

    @property
    def is_long(self) -> bool:
        """Whether the journal is long enough to be worth replacing by a snapshot."""
        return self.position > max(2 * self._preamble.snapshot_end + SLACK_BYTES, self._compact_beyond)

    def put_off(self) -> None:
        """Let the journal grow some more before replacing it, which failed, is tried again."""
        self._compact_beyond = self.position + SLACK_BYTES

    def replace(self, contents: Contents, *, continues: bool) -> None:
        """Replace the journal by a new file with these contents; when this raises, the old one stays.

        Those who have the old one open still see it unchanged. With `continues` they may read it to its end and go on
        where the snapshot in the new one ends; otherwise they must read the new one from its beginning.
        """
        self._directory.remove(NEW_JOURNAL)
        descriptor = self._directory.open(NEW_JOURNAL, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            preamble = Preamble(predecessor=self._preamble.marker if continues else NO_MARKER)
            end = PREAMBLE_BYTES
            for entries, blobs in contents:
                end = _write(descriptor, encode(preamble.marker, entries, blobs), end)
            preamble = dataclasses.replace(preamble, snapshot_end=end)
            _write(descriptor, preamble.encode(), 0)
            if self._sync:
                os.fsync(descriptor)
            self._directory.replace(NEW_JOURNAL, JOURNAL)
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                self._directory.remove(NEW_JOURNAL)
            raise
        self.close()
        self._descriptor, self._preamble, self.position = descriptor, preamble, end
        self._compact_beyond = 0
        self._unsynced = False

    def _opened(self) -> int:
        assert self._descriptor is not None, "opened before anything else is done with it"
        return self._descriptor


def _write(descriptor: int, data: bytes, position: int) -> int:
    """Write all of the data to the file from `position` on, and return where it ends."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, position)
        left = left[written:]
        position += written
    return position
