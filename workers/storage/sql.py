"""A durable queue in an SQLite file, for one machine; jobs can be enqueued in the caller's own transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from sqlalchemy import URL, Connection, Engine, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine

from workers.clock import Clock, ManualClock, SystemClock
from workers.errors import StorageError, StorageUnavailable, Unsupported, WorkersError
from workers.jobs import (
    CancelResult,
    Claim,
    EnqueueResult,
    JobOutcome,
    JobState,
    JobStatus,
    NewJob,
    Page,
    Recovery,
    Released,
    Renewal,
    Settlement,
    SettleOutcome,
    WorkerInfo,
    check_retention,
    check_text,
)
from workers.storage import (
    sql_claim,
    sql_enqueue,
    sql_leases,
    sql_manage,
    sql_records,
    sql_schema,
    sql_settle,
    sql_sqlite,
)
from workers.storage.base import Limits
from workers.storage.broadcast import BufferedSubscription
from workers.storage.sql_caller import real_path
from workers.storage.sql_rows import Transaction, milliseconds
from workers.storage.sql_sqlite import POLL, SqliteDatabase

T = TypeVar("T")

_DRAINED_AT_ONCE: Final = 1_000
_FIND_QUEUE = text("SELECT id FROM workers_queues WHERE name = :name")
_ADD_QUEUE = text("INSERT INTO workers_queues (name) VALUES (:name) RETURNING id")


class SqlStorage:
    """One queue in the `workers_*` tables of an SQLite file, which `migrate` makes.

    `target` is a URL (`sqlite:///jobs.db`) or an engine, of which only the URL is used: the storage opens connections
    of its own, shared by all storages of this process on that file. A step waits `busy_timeout` for other connections'
    transactions, then raises `StorageUnavailable`; the event loop is never blocked. A commit survives the death of the
    process; a crash of the operating system may lose the last ones.

    `enqueue(connection=...)` takes an SQLAlchemy `Connection`, `Session` or their asyncio forms, on the same file. A
    synchronous one is used in the calling thread. While that transaction is open, every other writing verb in the same
    task raises `TransactionError`.

    Raises:
        StorageError: the URL is malformed, or names no SQLite file.
        Unsupported: another database than SQLite.
    """

    limits: Final = Limits(clock="machine", durable=True, processes="machine", wakeup_latency=POLL, transactions=True)

    def __init__(
        self,
        target: str | URL | Engine | AsyncEngine,
        queue: str = "default",
        *,
        clock: Clock | None = None,
        busy_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        check_text("queue name", queue)
        self._path = _path(target)
        self._name = queue
        self._clock: Clock = clock or SystemClock()
        self._busy_timeout = busy_timeout
        self._users = 0
        self._connected: SqliteDatabase | None = None
        self._id = 0
        if isinstance(self._clock, ManualClock):
            self._clock.watch(self._wake)

    def __repr__(self) -> str:
        return f"SqlStorage('sqlite:///{self._path}', queue={self._name!r})"

    @property
    def queue(self) -> str:
        return self._name

    async def migrate(self) -> None:
        """The file exists and has the tables this version needs; from any older version, and by any number at once.

        Raises:
            StorageError: a newer version made the tables, or the file's directory does not exist.
            StorageUnavailable: another connection held its transaction too long.
        """
        if not Path(self._path).parent.is_dir():
            raise StorageError(f"directory {str(Path(self._path).parent)!r} does not exist; create it first")
        await asyncio.to_thread(sql_sqlite.migrate, self._path, self._busy_timeout)

    async def connect(self) -> None:
        database = sql_sqlite.acquire(self._path, self._busy_timeout)
        try:
            found = await asyncio.wrap_future(database.read(self._prepare))
            self._id = found or await asyncio.wrap_future(database.write(self._register, int))
        except BaseException:
            await sql_sqlite.release(database)
            raise
        self._users += 1
        self._connected = database

    def _prepare(self, connection: Connection) -> int:
        """The queue's number, 0 if it has none yet."""
        sql_schema.check(connection)
        return int(connection.execute(_FIND_QUEUE, {"name": self._name}).scalar() or 0)

    def _register(self, connection: Connection) -> int:
        return self._prepare(connection) or int(connection.execute(_ADD_QUEUE, {"name": self._name}).scalar_one())

    async def disconnect(self) -> None:
        database = self._connected
        if database is None:
            return
        self._users -= 1
        if not self._users:
            self._connected = None
        await sql_sqlite.release(database)

    # Jobs

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        if connection is None:
            return await self._write(partial(sql_enqueue.enqueue, jobs=jobs))
        database = self._database()
        return await database.callers.join(connection, partial(self._enqueue_with, database, jobs), self._wake)

    def _enqueue_with(
        self, database: SqliteDatabase, jobs: Sequence[NewJob], connection: Connection
    ) -> list[EnqueueResult]:
        transaction = self._transaction(connection)
        sql_enqueue.lock(transaction)
        results = sql_enqueue.enqueue(transaction, jobs)
        database.events.record(transaction, own=False)
        return results

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        """See `Storage.claim`; if cancelled meanwhile, what it claimed is released."""
        check_text("worker id", worker_id)
        future = self._submit(partial(sql_claim.claim, worker_id=worker_id, leases=dict(leases), limit=limit))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise

    def _give_back(self, future: Future[list[Claim]]) -> None:
        if future.cancelled() or future.exception() is not None or not future.result():
            return
        released = [Released(claim=claim) for claim in future.result()]
        try:
            self._submit_from_thread(partial(sql_settle.settle, settlements=released))
        except WorkersError:
            return  # disconnected: the leases will run out

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout.total_seconds()
        with self._database().notices.listen(self._id) as ears, ears.bell() as bell:
            while True:
                bell.clear()
                until_due = await self._read(partial(sql_claim.claimable_in, names=names))
                left = deadline - clock()
                if until_due is not None and not isinstance(self._clock, ManualClock):
                    left = min(left, until_due.total_seconds())
                if until_due == timedelta(0) or deadline - clock() <= 0:
                    return
                try:
                    async with asyncio.timeout(left):
                        await bell.wait()
                except TimeoutError:
                    continue

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        return await self._write(partial(sql_leases.renew, claims=claims)) if claims else Renewal()

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        return await self._write(partial(sql_settle.settle, settlements=settlements)) if settlements else []

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        return await self._write(partial(sql_leases.recover, limit=limit, max_stalls=max_stalls))

    async def sweep(self, limit: int) -> int:
        return await self._write(partial(sql_records.sweep, limit=limit))

    async def cancel(self, job_id: str) -> CancelResult:
        return await self._write(partial(sql_manage.cancel, job_id=job_id))

    # Reading

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        return await self._read(partial(sql_records.status, ids=ids))

    async def result(self, job_id: str) -> JobOutcome | None:
        return await self._read(partial(sql_records.result, job_id=job_id))

    async def counts(self) -> dict[JobState, int]:
        return await self._read(sql_records.counts)

    async def workers(self) -> list[WorkerInfo]:
        return await self._read(sql_records.workers)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[BufferedSubscription]:
        database = self._database()
        with database.notices.listen(self._id, subscribe=True) as ears:
            await self._listen(database)
            with ears.broadcast.everything() as subscription:
                yield subscription

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[BufferedSubscription]:
        database = self._database()
        with database.notices.listen(self._id, subscribe=True) as ears:
            await self._listen(database)
            with ears.broadcast.of_job(job_id) as subscription:
                yield subscription

    async def _listen(self, database: SqliteDatabase) -> None:
        """Other processes' events from now on will be heard."""
        if not database.events.is_listening(self._id):
            await self._write(database.events.listen)
        await asyncio.wrap_future(database.read(database.events.read))

    # Management

    async def pause(self) -> None:
        await self._write(partial(sql_manage.set_paused, paused=True))

    async def resume(self) -> None:
        await self._write(partial(sql_manage.set_paused, paused=False))

    async def retry(self, ids: Sequence[str]) -> int:
        return await self._write(partial(sql_manage.retry, ids=ids))

    async def remove(self, ids: Sequence[str]) -> int:
        return await self._write(partial(sql_manage.remove, ids=ids))

    async def promote(self, ids: Sequence[str]) -> int:
        return await self._write(partial(sql_manage.promote, ids=ids))

    async def drain(self) -> int:
        last = await self._read(sql_manage.last_seq)
        total = 0
        while gone := await self._write(partial(sql_manage.drain, last=last, limit=_DRAINED_AT_ONCE)):
            total += gone
        return total

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        return await self._write(partial(sql_manage.clean, state=state, older_than=older_than, limit=limit))

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        check_retention(ttl)
        return await self._write(partial(sql_manage.keep, job_id=job_id, ttl=ttl))

    # Running transitions

    def _database(self) -> SqliteDatabase:
        if self._connected is None:
            raise StorageUnavailable(f"{self!r} is not connected; call `await storage.connect()` first")
        return self._connected

    def _transaction(self, connection: Connection) -> Transaction:
        return Transaction(connection=connection, queue=self._id, now=milliseconds(self._clock.now()))

    async def _read(self, work: Callable[[Transaction], T]) -> T:
        future = self._database().read(lambda connection: work(self._transaction(connection)))
        return await asyncio.wrap_future(future)

    async def _write(self, work: Callable[[Transaction], T]) -> T:
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Callable[[Transaction], T]) -> Future[T]:
        self._database().callers.refuse_nested()
        return self._submit_from_thread(work)

    def _submit_from_thread(self, work: Callable[[Transaction], T]) -> Future[T]:
        database = self._database()

        def run(connection: Connection) -> tuple[T, Transaction]:
            transaction = self._transaction(connection)
            result = work(transaction)
            database.events.record(transaction, own=True)
            return result, transaction

        def tell(outcome: tuple[T, Transaction]) -> T:
            result, transaction = outcome
            database.notices.tell(transaction.queue, transaction.events, wake=transaction.wake)
            return result

        return database.write(run, tell)

    def _wake(self) -> None:
        if self._connected is not None:
            self._connected.notices.tell(self._id, (), wake=True)

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self._read(partial(sql_records.page, state=state, cursor=cursor, limit=limit))


def _path(target: str | URL | Engine | AsyncEngine) -> str:
    """The one spelling of the SQLite file that `target` names."""
    try:
        url = target.url if isinstance(target, (Engine, AsyncEngine)) else make_url(target)
    except (ArgumentError, ValueError):
        # Not chained: SQLAlchemy quotes the whole string, password included.
        raise StorageError("the storage's URL cannot be parsed; write sqlite:///path/to/jobs.db") from None
    backend = url.get_backend_name()
    if backend != "sqlite":
        raise Unsupported(f"SqlStorage speaks SQLite (sqlite:///path/to/jobs.db), not {backend}")
    name = url.database or ":memory:"
    if name == ":memory:":
        raise StorageError(
            "an in-memory database has one connection only; use MemoryStorage, or sqlite:///path/to/file"
        )
    if name.startswith("file:"):
        raise StorageError(f"SQLite database {name!r} is not a plain path; write sqlite:///path/to/jobs.db")
    return real_path(name)
