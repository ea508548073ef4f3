"""An SQLite file as this process uses it: one thread that writes, one that reads and watches for others' commits.

Theory of operation. SQLite has one writer at a time and its driver blocks, so a whole transition runs in the writer's
thread: one hop per transition, and commits queue up in order instead of polling for the file's lock. `BEGIN IMMEDIATE`
takes that lock before the first read, so what a transition has read is still true when it writes. The reader's thread
never waits for a writer (write-ahead log). While somebody waits or listens, it looks whether anybody has committed, a
moment after each write to the file's log, and every second (`changes.watcher`). It asks for `PRAGMA data_version`,
which costs no table access and changes when any other connection has committed. The answer that the writer's connection
gets to the same question leaves out what this process has committed by its own steps, of which everybody here was told.

With `synchronous = NORMAL` a commit survives the death of the process. A crash of the operating system may lose the
last commits, but never tears the file.

All storages of a process on one file share one `SqliteDatabase`, whatever their event loop; it counts its users.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from sqlalchemy import URL, Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from workers.errors import StorageError, StorageUnavailable
from workers.homes import ForkLock
from workers.jobs import (
    Claim,
    CronRow,
    EnqueueResult,
    NewJob,
    ProgressReport,
    Recovery,
    Renewal,
    Settlement,
    SettleOutcome,
)
from workers.storage.abilities import Exchange
from workers.storage.base import Capabilities
from workers.storage.sql.caller import Caller, Callers, real_path, run_on, translated
from workers.storage.sql.database import Begin
from workers.storage.sql.direct import Executor
from workers.storage.sql.rows import Transaction
from workers.storage.sql.sqlite import claim, enqueue, settle
from workers.storage.sql.sqlite.changes.events import EventLog
from workers.storage.sql.sqlite.changes.watcher import POLL, Sight, SqliteWatcher
from workers.storage.sql.sqlite.driver.connections import (
    SqliteDirect,
    async_engine,
    connect,
    data_version,
    migrate,
    open_writer,
    pragma,
    undo_when_cancelled,
)
from workers.storage.sql.sqlite.driver.thread import AtWork, SqliteThread
from workers.storage.sql.steps import crons
from workers.storage.sql.steps.dependents import resolve
from workers.storage.sql.steps.ends import recover
from workers.storage.subscribers import DatabaseSubscribers

T = TypeVar("T")


class SqliteDatabase:
    """One file, its two threads, and everybody in this process who waits for something in it."""

    def __init__(self, path: str, busy_timeout: timedelta) -> None:
        self.path = path
        self.name = f"SQLite database {path!r}"
        self.subscribers = DatabaseSubscribers()
        self.wakes_with_the_commit = False
        self.callers = Callers(path, self.name)
        self.users = 0
        # What the connections of the two threads said at the last look; both are touched by the reader's alone.
        self._seen: int | None = None
        self._seen_by_writer: tuple[Connection, int] | None = None
        self._unsure_since: float | None = None
        self._writer = SqliteThread("workers-sqlite-writer", self.name, lambda: open_writer(path, busy_timeout))
        self._reader = SqliteWatcher(
            "workers-sqlite-reader",
            self.name,
            lambda: self._open_reader(busy_timeout),
            path=path,
            look=self._look,
            wanted=lambda: self.subscribers.wanted,
        )
        self.events = EventLog(secrets.token_hex(8), self.subscribers, self._write_later)

    # The steps

    def enqueue(self, begin: Begin, jobs: Sequence[NewJob]) -> Future[list[EnqueueResult]]:
        return self.change(begin, partial(enqueue.enqueue, jobs=jobs))

    async def enqueue_with(self, connection: object, begin: Begin, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        return await self.change_with(connection, begin, partial(enqueue.enqueue, jobs=jobs))

    def replace_cron(self, begin: Begin, row: CronRow, jobs: Sequence[NewJob]) -> Future[bool]:
        return self.change(begin, partial(crons.replace_cron, row=row, jobs=jobs, enqueue=enqueue.enqueue))

    def claim(self, begin: Begin, worker_id: str, leases: Mapping[str, timedelta], limit: int) -> Future[list[Claim]]:
        return self.change(begin, partial(claim.claim, worker_id=worker_id, leases=leases, limit=limit))

    def claimable_in(self, begin: Begin, names: Collection[str]) -> Future[timedelta | None]:
        def run(transaction: Transaction) -> timedelta | None:
            due = claim.claimable_in(transaction, names=names)
            if due == timedelta(0):
                self._reader.find()
            return due

        return self.look(begin, run)

    def renew(self, begin: Begin, claims: Sequence[Claim]) -> Future[Renewal]:
        return self.change(begin, partial(claim.renew, claims=claims))

    def settle(self, begin: Begin, settlements: Sequence[Settlement]) -> Future[list[SettleOutcome]]:
        return self.change(begin, partial(settle.settle, settlements=settlements))

    def exchange(
        self,
        begin: Begin,
        settlements: Sequence[Settlement],
        worker_id: str,
        leases: Mapping[str, timedelta],
        limit: int,
    ) -> Future[Exchange] | None:
        # Handlers that take a while end one by one, and an exchange for each cost deliveries a fifth more CPU.
        return None

    async def settle_with(
        self, connection: object, begin: Begin, settlements: Sequence[Settlement]
    ) -> list[SettleOutcome]:
        return await self.change_with(connection, begin, partial(settle.settle, settlements=settlements))

    def progress(self, begin: Begin, reports: Sequence[ProgressReport]) -> Future[None]:
        return self.change(begin, partial(claim.progress, reports=reports))

    def recover(self, begin: Begin, limit: int, max_stalls: int) -> Future[Recovery]:
        return self.change(begin, partial(recover, limit=limit, max_stalls=max_stalls))

    # Running them

    def look(self, begin: Begin, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> Future[T]:
        return self._reader.submit(lambda connection: work(begin(SqliteDirect(connection))))

    def change(self, begin: Begin, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> Future[T]:
        def run(connection: Connection) -> T:
            with connection.begin():
                transaction = begin(SqliteDirect(connection))
                result = work(transaction)
                if transaction.ends:
                    resolve(transaction)
                for each in transaction.on_all_queues():
                    self.events.record(each, own=True)
            for each in transaction.on_all_queues():
                self.subscribers.tell(each.queue, each.events, wake=each.wake and not each.quiet)
            return result

        return self._writer.submit(run)

    async def change_with(self, connection: object, begin: Begin, work: Callable[[Transaction], T]) -> T:
        return await run_on(connection, lambda caller: self.change_on(caller, begin, work), self.name)

    def change_on(self, caller: Caller, begin: Begin, work: Callable[[Transaction], T]) -> T:
        def run(connection: Connection) -> T:
            enqueue.lock(connection)
            transaction = begin(connection)
            result = work(transaction)
            if transaction.ends:
                resolve(transaction)
            for each in transaction.on_all_queues():
                self.events.record(each, own=False)
            return result

        with translated(self.name):
            return self.callers.join(caller, run, self.look_now)

    def enqueue_on(self, caller: Caller, begin: Begin, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        return self.change_on(caller, begin, partial(enqueue.enqueue, jobs=jobs))

    def look_now(self) -> None:
        """Look for what was committed, without waiting for the watcher."""
        self.subscribers.wake_all()
        with contextlib.suppress(StorageUnavailable):  # disconnected meanwhile
            self._reader.submit(self._read_events)

    def wake(self, begin: Begin) -> Future[None]:
        def run(transaction: Transaction) -> None:
            self.subscribers.tell(transaction.queue, (), wake=True)

        return self.look(begin, run)

    def refuse_nested(self) -> None:
        self.callers.refuse_nested()

    def hear(self) -> None:
        """Do nothing: the watcher looks whenever somebody waits."""

    async def subscribe(self, begin: Begin, queue: int, *, of_one_job: bool = False) -> None:
        if not self.events.is_listening(queue):
            self.refuse_nested()
            await asyncio.wrap_future(self.change(begin, self.events.listen))
            self.events.listens(queue)
        if of_one_job and self.events.is_reading:
            self._reader.submit(self._read_events)  # which sets the watcher going, if nobody was waiting or listening
        else:
            await self.listen_for_cancels()

    async def listen_for_cancels(self) -> None:
        await asyncio.wrap_future(self._reader.submit(self._read_events))

    async def release(self) -> None:
        with _lock:
            self.users -= 1
            if self.users:
                return
            for key, other in list(_databases.items()):
                if other is self:
                    del _databases[key]
        await self.close()

    async def close(self) -> None:
        """End both threads and close their connections."""
        await asyncio.gather(*(asyncio.wrap_future(thread.stop()) for thread in (self._writer, self._reader)))

    def _open_reader(self, busy_timeout: timedelta) -> Connection:
        connection = connect(self.path, busy_timeout)
        pragma(connection, "query_only = ON")
        data_version(connection)  # SQLite opens the log with the first reading, and makes it if it is missing
        self._seen = None  # the versions of two connections cannot be compared
        return connection

    def _write_later(self, work: Callable[[Executor], None]) -> Future[None]:
        def run(connection: Connection) -> None:
            with connection.begin():
                work(SqliteDirect(connection))

        return self._writer.submit(run)

    def _look(self, connection: Connection) -> Sight:
        self.events.keep_listening()
        version = data_version(connection)
        if version == self._seen:
            return Sight.NOTHING
        try:
            # With the connection: a new one counts from its own beginning, and knows nothing of commits before that.
            by_writer = self._writer.peek(lambda connection: (connection, data_version(connection)))
        except AtWork:
            if not self._was_unsure_for(POLL):
                return Sight.UNSURE
            by_writer = None
        except DBAPIError:  # the writer's next step will find its connection broken
            by_writer = None
        self._unsure_since = None
        seen = Sight.OURS
        if by_writer is None or by_writer != self._seen_by_writer:
            seen = Sight.NEWS if self._read_events(connection) else Sight.OTHERS
            self.subscribers.wake_all()
        # Set last, to the versions before the reading: what was not read, or came since, is seen at the next look.
        self._seen, self._seen_by_writer = version, by_writer
        return seen

    def _read_events(self, connection: Connection) -> bool:
        return self.events.read(SqliteDirect(connection))

    def _was_unsure_for(self, time_enough: timedelta) -> bool:
        now = time.monotonic()
        self._unsure_since = self._unsure_since or now
        return now - self._unsure_since >= time_enough.total_seconds()


_lock = ForkLock()
# The key has the process: a fork's copies are of no use in the child, and closing them there would do harm.
_databases: dict[tuple[int, str, timedelta], SqliteDatabase] = {}


def acquire(path: str, busy_timeout: timedelta) -> SqliteDatabase:
    """Return this process's database on the file, counting one more user; each must `release` it."""
    if not os.path.exists(path):
        raise StorageError(
            f"SQLite database {path!r} does not exist; make it once, by `python -m workers migrate module:app`, or"
            " `await storage.migrate()`"
        )
    with _lock:
        key = (os.getpid(), path, busy_timeout)
        database = _databases.get(key)
        if database is None:
            database = _databases[key] = SqliteDatabase(path, busy_timeout)
        database.users += 1
        return database


@dataclass(frozen=True, slots=True)
class SqliteTarget:
    """An SQLite file."""

    path: str
    busy_timeout: timedelta

    capabilities: ClassVar[Capabilities] = Capabilities(
        dependencies_across_queues=True,
        clock="machine",
        durable=True,
        processes="machine",
        wakeup_latency=POLL,
        transactions=True,
        limit_keys=True,
        crons=True,
        farewells=True,
        ordered_listing=True,
        outside_continuations=True,
        held_wake_ups=True,
    )

    connections: ClassVar[int] = 0

    @classmethod
    def of(cls, url: URL, busy_timeout: timedelta) -> SqliteTarget:
        """Return the target with the one spelling of the file that `url` names.

        Raises:
            StorageError: it names no file.
        """
        name = url.database or ":memory:"
        if name == ":memory:":
            raise StorageError(
                "an in-memory database has one connection only; use MemoryStorage, or sqlite:///path/to/file"
            )
        if name.startswith("file:"):
            raise StorageError(f"SQLite database {name!r} is not a plain path; write sqlite:///path/to/jobs.db")
        return cls(real_path(name), busy_timeout)

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def acquire(self) -> SqliteDatabase:
        self._check_kind()
        return acquire(self.path, self.busy_timeout)

    def async_engine(self) -> AsyncEngine:
        return async_engine(self.path, self.busy_timeout)

    def adopt(self, engine: AsyncEngine) -> AsyncEngine:
        undo_when_cancelled(engine)
        return engine

    def migrate(self, make_tables: Callable[[Connection], None]) -> None:
        if not Path(self.path).parent.is_dir():
            raise StorageError(f"directory {str(Path(self.path).parent)!r} does not exist; create it first")
        self._check_kind()
        migrate(self.path, self.busy_timeout, make_tables)

    def _check_kind(self) -> None:
        if Path(self.path).is_dir():
            raise StorageError(f"SQLite database {self.path!r} is a directory; name a file in it")
