"""This process's copy of one queue: brought up to date under the lock, changed, and made durable by one write."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.errors import StorageError
from workers.jobs import JobEventKind
from workers.storage.file.codec import BadEntry, decode
from workers.storage.file.directory import QueueDirectory
from workers.storage.file.frames import PREAMBLE_BYTES, Damage, Frame
from workers.storage.file.journal import Journal
from workers.storage.file.state import FileState, JournalStep
from workers.storage.subscribers import Told

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Announcements:
    """What to tell the waiters and subscribers of this process."""

    events: list[Told] = field(default_factory=list)
    wake: bool = False

    def add(self, step: JournalStep) -> None:
        self.events += step.events
        self.wake |= step.wake


class QueueCopy:
    """The journal and the state it adds up to; every method needs the directory's lock."""

    def __init__(self, directory: QueueDirectory, name: str, *, sync: bool) -> None:
        self._directory = directory
        self._name = name
        self.journal = Journal(directory, sync=sync)
        self._state: FileState | None = None
        self._old: FileState | None = None

    def close(self) -> None:
        self.journal.close()
        self.forget()

    def forget(self) -> None:
        """Give up the state, which no longer matches the journal; the next `refresh` reads it again."""
        self._old = self._state or self._old
        self._state = None

    def refresh(self, news: Announcements) -> FileState:
        """Return the state, brought up to date with the journal; `news` gets what others did.

        Raises:
            StorageError: the journal was deleted, or belongs to another version or queue.
        """
        if not (self._state or self._old or self.journal.position):
            self._state = self._read_anew(news)
        elif not self.journal.exists():
            raise StorageError(f"{self._directory.path}: the journal was deleted while in use; start again")
        elif self._state is None or not self._catch_up(self._state, news):
            self._state = self._read_anew(news)
        return self._state

    def _catch_up(self, state: FileState, news: Announcements) -> bool:
        while True:
            current = self.journal.is_current()
            if not self._read_on(state, news):
                return False
            if current:
                return True
            if not self.journal.follow():
                return False

    def _read_on(self, state: FileState, news: Announcements) -> bool:
        for found in self.journal.news():
            if isinstance(found, Damage):
                return False
            try:
                news.add(state.apply(decode(found)))
            except BadEntry:
                return False
        return True

    # From the beginning

    def _read_anew(self, news: Announcements) -> FileState:
        self.forget()
        state = FileState(self._name)
        marker, position = self.journal.marker, self.journal.position
        self.journal.open(empty=state.snapshot())
        if self.journal.marker != marker:
            position = PREAMBLE_BYTES
        damaged = False
        for found in self.journal.news():
            if isinstance(found, Frame):
                damaged |= not self._restore(
                    state, found, news if found.start >= position > PREAMBLE_BYTES else Announcements()
                )
            elif found.torn:
                self._cut_torn_end(found)
            else:
                self.journal.set_aside(found, "damaged: what follows is whole")
                damaged = True
        if self._old is not None:
            if self.journal.marker != marker:
                news.events += _missed(self._old, state)
            news.wake = True
        if damaged:
            self.journal.replace(state.snapshot(), continues=False)
        self._old = None
        return state

    def _restore(self, state: FileState, frame: Frame, news: Announcements) -> bool:
        try:
            news.add(state.apply(decode(frame)))
        except BadEntry as error:
            if frame.start == PREAMBLE_BYTES and str(error).startswith("it is"):
                raise StorageError(f"{self._directory.path}: {error}; name another directory") from None
            void = Damage(start=frame.start, end=frame.end, torn=False)
            self.journal.set_aside(void, f"not what this version writes: {error}")
            return False
        return True

    def _cut_torn_end(self, damage: Damage) -> None:
        self.journal.set_aside(damage, "torn: a write that did not come to its end, and nobody was told of")
        self.journal.cut(damage.start)

    # Forward

    def commit(self, frames: list[bytes]) -> None:
        """Write the frames, which hold what changed in the state, to the disk; or forget the state and raise."""
        try:
            if frames:
                self.journal.append(frames)
            else:
                self.journal.settle()
        except BaseException:
            self.forget()
            raise

    def compact(self, state: FileState) -> None:
        """Replace the journal by a snapshot of the state, unless the disk is too full for it."""
        try:
            self.journal.replace(state.snapshot(), continues=True)
        except OSError as error:
            self.journal.put_off()
            _LOG.warning("%s: the journal cannot be compacted: %s", self._directory.path, error)


def _missed(old: FileState, new: FileState) -> Iterable[Told]:
    """Yield the ends of jobs, and requests to cancel, that were missed.

    They happened while the state could not be followed step by step.
    """
    for job in old.table.everyone():
        if job.finished:
            continue
        job_id = job.new.id
        now = new.table.get(job_id)
        if job.token is not None and (now is None or now.token != job.token or now.cancel_requested):
            yield JobEventKind.CANCEL_REQUESTED, job_id, None
        if now is not None and now.finished:
            yield JobEventKind(now.state.value), job_id, None
        elif now is None:
            yield JobEventKind.COMPLETED, job_id, None
