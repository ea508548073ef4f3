"""A durable queue in an SQL database: an SQLite file or PostgreSQL; jobs can join the caller's own transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeVar

from sqlalchemy import URL, Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from workers.checks import check_text
from workers.clock import Clock, ManualClock, SystemClock
from workers.errors import StorageUnavailable, Unsupported, WorkersError
from workers.jobs import (
    CancelResult,
    Claim,
    CronLook,
    CronRow,
    EnqueueResult,
    JobOutcome,
    JobRecord,
    JobRef,
    JobState,
    JobStatus,
    Moved,
    NewJob,
    Page,
    ProgressReport,
    Recovery,
    Released,
    Renewal,
    Retention,
    Settlement,
    SettleOutcome,
    WorkerInfo,
    check_retention,
)
from workers.limits import HeldBack, Limit
from workers.storage.abilities import Admission, Exchange
from workers.storage.base import Capabilities
from workers.storage.rules import bounded_count, check_claim
from workers.storage.sql import schema
from workers.storage.sql.caller import Sessions, checked
from workers.storage.sql.database import Database, Joined, Step, add_queue, admission, find_queue, outcome
from workers.storage.sql.direct import Executor
from workers.storage.sql.rows import Transaction, milliseconds
from workers.storage.sql.steps import crons, dependents, limits, manage, records
from workers.storage.sql.steps.limits import declare
from workers.storage.sql.target import parse_target
from workers.storage.subscribers import BufferedSubscription, HeldWakes

T = TypeVar("T")

_DRAINED_AT_ONCE: Final = 1_000
_BEGINS_IN: Final = timedelta(seconds=30)
"""How long a session may take to begin, the wait for a connection or for SQLite's write lock included."""
_POSTGRES_CLOCK = text("SELECT workers_now()")


class SqlStorage:
    """One queue in the `workers_*` tables of an SQLite file or a PostgreSQL database, which `migrate` makes.

    `target` is a URL (`sqlite:///jobs.db`, `postgresql://user@host/name`) or an engine, of which only the URL is used.
    The storage opens connections of its own, shared by all storages of this process on that database; on PostgreSQL at
    most six. Only sessions for handlers (`job.transaction()`) come from the engine, if it is an asyncio one. Otherwise
    they come from an engine that this object makes when first needed, with one connection on SQLite and up to ten on
    PostgreSQL. A step waits `busy_timeout` for other connections' transactions, then raises `StorageUnavailable`; the
    event loop is never blocked. On SQLite a commit survives the death of the process, but a crash of the operating
    system may lose the last ones. On PostgreSQL it is as safe as that server's settings make it.

    `connection=...` is an SQLAlchemy `Connection`, `Session` or their asyncio forms, on the same database. A
    synchronous one is used in the calling thread. The storage need not be connected for it, only disconnected in the
    end. On SQLite, while that transaction is open, every other writing verb in the same task raises `TransactionError`.

    `clock` replaces the machine's on SQLite; PostgreSQL uses its own.

    Raises:
        StorageError: the URL is malformed, or names no SQLite file.
        Unsupported: another database than these, or a `clock` for PostgreSQL.
    """

    exchanges_at_once: Final = 1

    def __init__(
        self,
        target: str | URL | Engine | AsyncEngine,
        queue: str = "default",
        *,
        clock: Clock | None = None,
        busy_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        check_text("queue name", queue)
        self._target = parse_target(target, busy_timeout)
        self._capabilities = self._target.capabilities  # as each enqueue asks for them
        self._name = queue
        if clock is not None and self.capabilities.clock == "server":
            raise Unsupported("PostgreSQL's own clock decides what is due; leave `clock` out")
        self._clock: Clock = clock or SystemClock()
        self._users = 0
        self._connected: Database | None = None
        given = self._target.adopt(target) if isinstance(target, AsyncEngine) else None
        self._sessions = Sessions(given, self._target.async_engine)
        self._held_wakes = HeldWakes()
        self._trusts_wake_ups = False  # a claim has to bring jobs first: also a listener that begins wakes
        self._id = 0
        self._joined = Joined(queue, self._target.acquire, self._now)
        if isinstance(self._clock, ManualClock):
            self._clock.watch(self._wake)

    def __repr__(self) -> str:
        return f"SqlStorage({self._target.url!r}, queue={self._name!r})"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def queue(self) -> str:
        return self._name

    @property
    def connections(self) -> int:
        """See `Pooled.connections`."""
        return self._target.connections

    async def admission(self) -> Admission:
        """See `Pooled.admission`."""
        await self.connect()
        try:
            return await self._read(lambda transaction: admission(transaction.connection))
        finally:
            await self.disconnect()

    async def migrate(self) -> None:
        """Make the tables where they are missing.

        This makes the SQLite file, but no PostgreSQL database.

        Raises:
            StorageError: another version made the tables, or there is no place for them.
            StorageUnavailable: the server did not answer, or another connection held its transaction too long.
        """
        await asyncio.to_thread(self._target.migrate, schema.migrate)

    async def connect(self) -> None:
        database = self._target.acquire()
        try:
            found = await outcome(
                database.look(self._transaction, lambda step: find_queue(step.connection, self._name))
            )
            if not found:
                database.refuse_nested()
                found = await outcome(
                    database.change(self._transaction, lambda step: add_queue(step.connection, self._name))
                )
        except BaseException:
            await database.release()
            raise
        self._id = found
        self._joined.knows(found)
        self._users += 1
        self._connected = database

    async def disconnect(self) -> None:
        database = self._connected
        if database is None:
            await self.leave()
            return
        self._users -= 1
        try:
            if not self._users:
                self._connected = None
                await self._sessions.dispose()
                await self.leave()
        finally:
            await database.release()

    async def leave(self) -> None:
        """See `Joinable.leave`."""
        if not self._users:
            await self._joined.release()

    # Jobs

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        if connection is not None:
            return await self._joined.enqueue(connection, jobs)
        begin = partial(self._transaction, quiet=self._held_wakes.held(jobs))
        return await outcome(self._writable().enqueue(begin, jobs))

    def enqueue_on(self, jobs: Sequence[NewJob], connection: object) -> list[EnqueueResult]:
        """Enqueue in the transaction of `connection`, a synchronous one, in the calling thread; see `enqueue`.

        Raises:
            TypeError: `connection` is not an SQLAlchemy `Connection` or `Session`.
            StorageError: it belongs to another database, which has nothing of the jobs then.
        """
        return self._joined.enqueue_on(checked(connection), jobs)

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        """See `Storage.claim`; if it is cancelled meanwhile, what it claimed is released.

        If its event loop ends as well, the lease runs out instead.
        """
        check_claim(worker_id, leases)
        future = self._writable().claim(self._transaction, worker_id, dict(leases), bounded_count(limit))
        try:
            claims = await outcome(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise
        self._trusts_wake_ups = self._trusts_wake_ups or bool(claims)
        return claims

    def _give_back(self, future: Step[list[Claim]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._release(future.result())

    def _release(self, claims: Sequence[Claim]) -> None:
        if not claims:
            return
        with suppress(WorkersError):  # disconnected: the leases will run out
            self._database().settle(self._transaction, [Released(claim=claim) for claim in claims])

    async def settle_and_claim(
        self, settlements: Sequence[Settlement], worker_id: str, *, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        """See `ExchangesJobs.settle_and_claim`; if it is cancelled meanwhile, what it claimed is released."""
        check_claim(worker_id, leases)
        begin, count = self._transaction, bounded_count(limit)
        future = self._writable().exchange(begin, settlements, worker_id, dict(leases), count)
        if future is None:
            return Exchange(outcomes=await self.settle(settlements))
        try:
            return await outcome(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back_exchange)
            raise

    def _give_back_exchange(self, future: Step[Exchange]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._release(future.result().claims or ())

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout.total_seconds()
        database = self._database()
        with database.subscribers.listen(self._id) as subscribers, subscribers.woken() as woken:
            database.hear()
            while True:
                woken.clear()
                until_due = await outcome(database.claimable_in(self._transaction, names))
                left = deadline - clock()
                if until_due is not None and not isinstance(self._clock, ManualClock):
                    left = min(left, until_due.total_seconds())
                if until_due == timedelta(0) or deadline - clock() <= 0:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await woken.wait()
                if woken.is_set() and database.wakes_with_the_commit and self._trusts_wake_ups:
                    self._trusts_wake_ups = False  # others were woken, too, and may be sooner
                    return

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        if not claims:
            return Renewal()
        return await outcome(self._writable().renew(self._transaction, claims))

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        if not settlements:
            return []
        if connection is not None:
            return await self._joined.settle(connection, settlements)
        return await outcome(self._writable().settle(self._transaction, settlements))

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        if reports:
            await outcome(self._writable().progress(self._transaction, reports))

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        return await outcome(self._writable().recover(self._transaction, bounded_count(limit), max_stalls))

    async def sweep(self, limit: int) -> int:
        return await self._write(partial(records.sweep, limit=bounded_count(limit)))

    async def farewell(self, worker_id: str) -> None:
        await self._write(partial(records.farewell, worker_id=worker_id))

    async def cancel(self, job_id: str) -> CancelResult:
        return await self._write(partial(manage.cancel, job_id=job_id))

    # Reading

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        return await self._read(partial(records.status, ids=ids))

    async def read(self, ids: Sequence[str]) -> list[JobRecord | None]:
        return await self._read(partial(records.read, ids=ids))

    async def result(self, job_id: str) -> JobOutcome | None:
        return await self._read(partial(records.result, job_id=job_id))

    async def counts(self) -> dict[JobState, int]:
        return await self._read(records.counts, at_leisure=True)

    async def waiting_since(self) -> datetime | None:
        return await self._read(records.waiting_since, at_leisure=True)

    async def workers(self) -> list[WorkerInfo]:
        return await self._read(records.workers, at_leisure=True)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[BufferedSubscription]:
        database = self._database()
        with database.subscribers.listen(self._id, subscribe=True) as subscribers:
            await database.subscribe(self._transaction, self._id)
            with subscribers.listening.everything() as subscription:
                yield subscription

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        database = self._database()
        with (
            database.subscribers.listen(self._id, for_cancels=True) as subscribers,
            subscribers.listening.cancel_requests() as subscription,
        ):
            await database.listen_for_cancels()
            yield subscription

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[BufferedSubscription]:
        database = self._database()
        with database.subscribers.listen(self._id, subscribe=True) as subscribers:
            await database.subscribe(self._transaction, self._id, of_one_job=True)
            with subscribers.listening.of_job(job_id) as subscription:
                yield subscription

    # Management

    async def pause(self) -> None:
        await self._write(partial(manage.set_paused, paused=True))

    async def resume(self) -> None:
        await self._write(partial(manage.set_paused, paused=False))

    async def is_paused(self) -> bool:
        return await self._read(manage.is_paused)

    async def retry(self, ids: Sequence[str]) -> Moved:
        return await self._write(partial(manage.retry, ids=ids), at_leisure=True)

    async def remove(self, ids: Sequence[str], *, running: bool = False, connection: object | None = None) -> int:
        return await self._write(partial(manage.remove, ids=ids, running=running), connection, at_leisure=True)

    async def crons(self, *, due: bool = False) -> CronLook:
        return await self._read(partial(crons.crons, due=due))

    async def replace_cron(self, row: CronRow, *, jobs: Sequence[NewJob] = ()) -> bool:
        return await outcome(self._writable().replace_cron(self._transaction, row, jobs))

    async def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        await self._write(partial(declare, limits=dict(limits)))
        self._joined.knows(self._id, limits=limits)

    def bring_limits(self, limits: Mapping[str, Limit]) -> None:
        """See `Joinable.bring_limits`."""
        self._joined.bring_limits(limits)

    async def declared_limits(self) -> dict[str, Limit]:
        return await self._read(limits.declared)

    async def remove_limit(self, name: str) -> bool:
        return await self._write(partial(limits.remove, name=name))

    async def followed(self, job_id: str) -> list[JobRef]:
        return await self._read(partial(dependents.followed, job_id=job_id))

    async def outcomes(self, job_id: str) -> dict[JobRef, JobOutcome | None]:
        return await self._read(partial(dependents.outcomes, job_id=job_id))

    async def followers(self, job_id: str, *, limit: int = 1_000) -> list[JobRef]:
        return await self._read(partial(dependents.followers, job_id=job_id, limit=limit))

    async def held_back(self, ids: Sequence[str]) -> list[HeldBack | None]:
        return await self._read(partial(limits.held_back, ids=ids))

    async def complete(
        self, job_id: str, result: bytes, *, keep: Retention | None = None, connection: object | None = None
    ) -> JobState | None:
        return await self._write(partial(manage.complete, job_id=job_id, result=result, keep=keep), connection)

    async def continue_job(self, then: NewJob, *, connection: object | None = None) -> JobState | None:
        return await self._write(partial(manage.continue_job, then=then), connection)

    async def promote(self, ids: Sequence[str]) -> int:
        return await self._write(partial(manage.promote, ids=ids), at_leisure=True)

    async def drain(self) -> int:
        last = await self._read(manage.last_seq, at_leisure=True)
        total = 0
        while gone := await self._write(partial(manage.drain, last=last, limit=_DRAINED_AT_ONCE), at_leisure=True):
            total += gone
        return total

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        return await self._write(
            partial(manage.clean, state=state, older_than=older_than, limit=bounded_count(limit)), at_leisure=True
        )

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        check_retention(ttl)
        return await self._write(partial(manage.keep, job_id=job_id, ttl=ttl))

    # The caller's transactions

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """Open a session in a transaction on this database; what it has not committed by the end is undone.

        On SQLite it holds the write lock from its beginning.

        Raises:
            TransactionError: on SQLite, this task holds another transaction open that wrote to the queue.
            StorageUnavailable: the database did not answer, or the lock or a connection was not free in time.
        """
        database = self._writable()
        async with self._sessions.open() as session:
            try:
                async with asyncio.timeout(_BEGINS_IN.total_seconds()):
                    await database.change_with(session, self._transaction, lambda _: None)
            except TimeoutError:
                raise StorageUnavailable(f"{self!r} does not answer") from None
            yield session

    def with_notify(self, connection: object | None = None) -> AbstractAsyncContextManager[None]:
        """Wake those who wait once, at the end of the block, as `HoldsWakeUps.with_notify` says.

        With `connection`, tell waiters and subscribers of this process of the block's jobs as soon as that has
        committed them. Nobody ever hears of them before the commit. A session announces its commit by itself, and so
        does PostgreSQL; a bare connection on SQLite does not, and without this its jobs are noticed like another
        process's.
        The transaction may end in the block or after it. A block that raises tells of what was committed too.

        Raises:
            TypeError: `connection` is not an SQLAlchemy connection or session.
        """
        return self._held_wakes.hold(self._wake_for) if connection is None else self._joined.telling(connection)

    async def _wake_for(self, _: Collection[str]) -> None:
        await outcome(self._database().wake(self._transaction))

    # Running transitions

    def _database(self) -> Database:
        if self._connected is None:
            raise StorageUnavailable(f"{self!r} is not connected; call `await storage.connect()` first")
        return self._connected

    def _writable(self) -> Database:
        database = self._database()
        database.refuse_nested()
        return database

    def _transaction(self, connection: Executor, *, quiet: bool = False) -> Transaction:
        return Transaction(connection=connection, queue=self._id, clock=self._now, quiet=quiet)

    def _now(self, connection: Executor) -> int:
        if self.capabilities.clock == "server":
            return int(connection.execute(_POSTGRES_CLOCK).scalar_one())
        return milliseconds(self._clock.now())

    async def _read(self, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> T:
        return await outcome(self._database().look(self._transaction, work, at_leisure=at_leisure))

    async def _write(
        self, work: Callable[[Transaction], T], connection: object | None = None, *, at_leisure: bool = False
    ) -> T:
        if connection is not None:
            return await self._joined.change(connection, work)
        return await outcome(self._writable().change(self._transaction, work, at_leisure=at_leisure))

    def _wake(self) -> None:
        if self._connected is not None:
            self._connected.subscribers.tell(self._id, (), wake=True)

    # Last, because from here on `list` is this method and no longer the type.
    async def list_in_order(
        self, state: JobState, *, name: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page:
        wanted = partial(records.page, state=state, name=name, cursor=cursor, limit=bounded_count(limit))
        return await self._read(wanted, at_leisure=True)

    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self.list_in_order(state, cursor=cursor, limit=limit)
