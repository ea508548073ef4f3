"""One queue's directory as this process uses it: a thread that takes steps in batches and writes each batch once.

Theory of operation. Verbs are handed over as functions of the state. While the thread waits for the disk, more of them
gather. The next batch takes them all: one lock, one look at what others wrote, one write, one fsync, however many they
are. Answers and events go out only after that, when the lock has been released. All storages of a process on one queue
of one directory share a thread, whatever their event loop; it counts its users.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

from workers.errors import StorageError, StorageUnavailable, WorkersError
from workers.storage.file.copy import Announcements, QueueCopy
from workers.storage.file.directory import QueueDirectory, directory_of, translate
from workers.storage.file.state import FileState
from workers.storage.subscribers import DatabaseSubscribers

T = TypeVar("T")

POLL: Final = timedelta(milliseconds=50)
BUSY_TIMEOUT: Final = timedelta(seconds=10)
QUEUE_NUMBER: Final = 0
"""A thread has one queue, so its announcements need no names."""

_MOST_AT_ONCE: Final = 500
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One verb: a step to take, and the future that gets its answer once the step is safe."""

    future: Future[object]
    work: Callable[[FileState], object]
    writes: bool
    quiet: bool = False
    """Whether nobody is to be woken, because somebody else will do that."""


class FileThread:
    """The thread, the tasks handed to it, and everybody in this process who waits for something in the queue."""

    def __init__(self, path: Path, name: str, *, sync: bool) -> None:
        self.path = path
        self.subscribers = DatabaseSubscribers()
        self.users = 0
        self._name = name
        self._sync = sync
        self._directory: QueueDirectory | None = None
        self._copy: QueueCopy | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped: Future[None] | None = None
        self._failing = False
        self._process = os.getpid()
        # A daemon, so that a program that forgot to disconnect can end; that does the journal no harm.
        self._thread = threading.Thread(target=self._run, name="workers-file", daemon=True)
        self._thread.start()

    def read(self, work: Callable[[FileState], T]) -> Future[T]:
        """Return the future of what `work` finds; it changes nothing, except what the clock changes."""
        return self._submit(work, writes=False)

    def write(self, work: Callable[[FileState], T], *, quiet: bool = False) -> Future[T]:
        """Return the future of what `work` answers, resolved when all that it changed is on the disk.

        With `quiet` nobody is woken.
        """
        return self._submit(work, writes=True, quiet=quiet)

    def _submit(self, work: Callable[[FileState], T], *, writes: bool, quiet: bool = False) -> Future[T]:
        future: Future[T] = Future()
        if self._process != os.getpid():
            raise StorageError(f"{self.path} was opened before this process was forked; connect again")
        with self._lock:
            if self._stopped is not None:
                raise StorageUnavailable(f"{self.path} was disconnected")
            task = _Task(future=future, work=work, writes=writes, quiet=quiet)  # type: ignore[arg-type]  # its own T
            self._tasks.put(task)
        return future

    async def close(self) -> None:
        """Wait until everything handed in is done, then close the files and end the thread."""
        with self._lock:
            if self._stopped is None:
                self._stopped = Future()
                if self._process == os.getpid():
                    self._tasks.put(None)
                else:
                    self._stopped.set_result(None)  # a fork's copy: the thread stayed behind
        await asyncio.shield(asyncio.wrap_future(self._stopped))

    # In the thread

    def _run(self) -> None:
        while self._take_group():
            pass
        self._shut()
        assert self._stopped is not None, "only close() ends the thread"
        self._stopped.set_result(None)

    def _take_group(self) -> bool:
        # A method of its own, so that an idle thread keeps no reference to its last group.
        group: deque[_Task] = deque()
        going_on = True
        try:
            while len(group) < _MOST_AT_ONCE:
                task = self._tasks.get(timeout=self._patience()) if not group else self._tasks.get_nowait()
                if task is None:
                    going_on = False
                    break
                if task.future.set_running_or_notify_cancel():
                    group.append(task)
        except queue.Empty:
            pass
        if group:
            self._do(group)
        elif going_on:
            self._watch()
        return going_on

    def _patience(self) -> float | None:
        return POLL.total_seconds() if self.subscribers.wanted else None

    def _watch(self) -> None:
        """Tell those who wait or listen what other processes did."""
        try:
            news = self._copy is not None and self._copy.journal.changed()
        except OSError:
            news = True  # and what is wrong will show
        if news:
            self._do(deque())

    def _do(self, group: deque[_Task]) -> None:
        """Resolve every task's future, by its answer or by the error that kept it from being safe."""
        while True:
            batch = _Group(tasks=group)
            try:
                with self._opened().locked():
                    self._take_steps(batch)
            except Exception as error:  # whatever it is, the thread must live: others wait for their tasks
                self._tell(batch.heard)
                self._fail(batch, error)
                return
            self._failing = False
            self._tell(batch.heard)
            self._tell(batch.done)
            for future, answer in batch.answers:
                _resolve(future, answer)
            group = batch.tasks
            if not group:
                return

    def _take_steps(self, batch: _Group) -> None:
        """Take the steps of as many tasks as can be written together; the others are left for another batch.

        Tasks that have an answer afterwards are safe. If this raises, none is.
        """
        assert self._copy is not None, "opened with the directory"
        copy = self._copy
        state = copy.refresh(batch.heard)
        if copy.journal.is_long:
            copy.compact(state)
        frames: list[bytes] = []
        while batch.tasks and not batch.spoilt:
            _take_step(batch, state, copy, frames)
        copy.commit(frames)
        if batch.spoilt:
            copy.forget()

    def _opened(self) -> QueueDirectory:
        if self._directory is None:
            self._directory = QueueDirectory(self.path, sync=self._sync, busy_timeout=BUSY_TIMEOUT)
            self._copy = QueueCopy(self._directory, self._name, sync=self._sync)
        return self._directory

    def _tell(self, news: Announcements) -> None:
        self.subscribers.tell(QUEUE_NUMBER, news.events, wake=news.wake)

    def _fail(self, batch: _Group, error: Exception) -> None:
        waiting = [future for future, _ in batch.answers] + [task.future for task in batch.tasks]
        if not waiting and not self._failing:
            _LOG.warning("%s: cannot watch for what others do: %s", self.path, error)
            self._failing = True
            self.subscribers.wake_all()  # let those who wait see the error
        if not isinstance(error, OSError | WorkersError) and self._copy is not None:
            self._copy.forget()  # a bug, and nobody knows how far it got
        for future in waiting:
            ours = translate(error, str(self.path)) if isinstance(error, OSError) else error
            if ours is not error:
                ours.__cause__ = error
            future.set_exception(ours)

    def _shut(self) -> None:
        if self._copy is not None:
            self._copy.close()
        if self._directory is not None:
            self._directory.close()


@dataclass(slots=True, kw_only=True)
class _Group:
    """Tasks and their answers; `heard` is what other processes did, which is true whatever becomes of ours."""

    tasks: deque[_Task]
    spoilt: bool = False
    """Whether a step raised half-way, so that the state is not to be trusted."""
    answers: list[tuple[Future[object], object]] = field(default_factory=list)
    heard: Announcements = field(default_factory=Announcements)
    done: Announcements = field(default_factory=Announcements)


@dataclass(frozen=True, slots=True)
class _Refused:
    """The step raised an error that the caller caused and is to receive."""

    error: Exception


def _take_step(batch: _Group, state: FileState, copy: QueueCopy, frames: list[bytes]) -> None:
    """Answer the first task, and add what it changed to `done` and `frames`."""
    task = batch.tasks.popleft()
    answer: object
    try:
        answer = task.work(state)
        if task.writes and state.changed:
            step = state.step()
            frames.append(copy.journal.encode(step.entries, step.blobs))
            state.written()
            batch.done.add(replace(step, wake=False) if task.quiet else step)
    except Exception as error:
        answer = _Refused(error)
        batch.spoilt = state.changed
    batch.answers.append((task.future, answer))


def _resolve(future: Future[object], answer: object) -> None:
    if isinstance(answer, _Refused):
        future.set_exception(answer.error)
    else:
        future.set_result(answer)


_lock = threading.Lock()
# The key has the process: a fork's copies are of no use in the child, and closing them there would do harm.
_lanes: dict[tuple[int, Path, bool], FileThread] = {}


def acquire(root: Path, name: str, *, sync: bool) -> FileThread:
    """Return this process's thread for the queue, counting one more user; each must `release` it."""
    path = directory_of(Path(os.path.realpath(root)), name)
    with _lock:
        key = (os.getpid(), path, sync)
        thread = _lanes.get(key)
        if thread is None:
            thread = _lanes[key] = FileThread(path, name, sync=sync)
        thread.users += 1
        return thread


async def release(thread: FileThread) -> None:
    """Count one user less; with the last one the thread ends and the files are closed."""
    with _lock:
        thread.users -= 1
        if thread.users:
            return
        for key, other in list(_lanes.items()):
            if other is thread:
                del _lanes[key]
    await thread.close()
