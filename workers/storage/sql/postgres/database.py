"""A PostgreSQL database as this process uses it: a few connections, and one that listens.

Theory of operation. A step is one statement outside any transaction, so it takes one round trip and leaves nothing
open. What is short runs in the event loop (see `driver`). Steps that need several statements run in a transaction of
their own, in a thread. The steps of running workers (claims, renewals, settlements) have connections of their own: they
never wait for a caller's transaction, as an enqueue of the same id must. All storages of a process on one database
share one `PostgresDatabase`, whatever their event loop; it counts its users.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Final, Protocol, TypeVar

from sqlalchemy import Connection, Engine, text

from workers.errors import StorageError, StorageUnavailable
from workers.jobs import (
    Cancelled,
    Claim,
    Continued,
    CronRow,
    EnqueueResult,
    JobEventKind,
    NewJob,
    ProgressReport,
    Recovery,
    Renewal,
    Settlement,
    SettleOutcome,
)
from workers.storage.abilities import Exchange
from workers.storage.sql.caller import Caller, connection_of, run_on, translated
from workers.storage.sql.database import Begin, Step, outcome
from workers.storage.sql.direct import Executor
from workers.storage.sql.postgres import steps
from workers.storage.sql.postgres.driver.direct import PostgresDirect, PostgresJoined, driver_of
from workers.storage.sql.postgres.driver.listener import REGISTERED, PostgresListener, PostgresPoller, new_process
from workers.storage.sql.postgres.driver.loop_step import Asking, run_blocking
from workers.storage.sql.postgres.driver.pool import StepPool
from workers.storage.sql.postgres.driver.silence import OwnConnection, Patience
from workers.storage.sql.postgres.session import OwnSessions, Place, check, place_of
from workers.storage.sql.postgres.steps import LostClaims
from workers.storage.sql.rows import Transaction
from workers.storage.sql.steps import crons
from workers.storage.sql.steps.ends import fails, recover
from workers.storage.subscribers import DatabaseSubscribers, Told

T = TypeVar("T")

PROMPT: Final = 3
PATIENT: Final = 2
_FEW: Final = 100
"""What is about more jobs than these would hold the event loop up."""
_SHORT: Final = 65_536
"""So would more bytes than these."""
_SILENCE: Final = timedelta(seconds=3)
"""How long after the busy timeout a server that says nothing counts as absent."""
_PER_JOB: Final = timedelta(milliseconds=1)
"""So much longer it may take over each job of a step."""
_MANY: Final = 1_000_000
_AT_LEISURE: Final = timedelta(minutes=5)
"""And so long over anything, as over what an operator asks for about all jobs."""
_FAREWELL: Final = timedelta(seconds=5)
"""How long what is under way is waited for when the last storage is disconnected."""

_LISTEN = text("SELECT workers_listen(:queue, :process, :valid)")
_REQUEST_CANCEL = text("SELECT workers_notify('workers_cancels', :request)")
_TELL = text("SELECT workers_tell(:queue, CAST(:events AS text[]), :wake, :sure)")


def _take_several_statements(jobs: Sequence[NewJob]) -> bool:
    return any(job.deduplication is not None or job.follows for job in jobs)


def _are_few_and_short(settlements: Sequence[Settlement]) -> bool:
    return len(settlements) <= _FEW and _are_short(steps.stored(settlement) or b"" for settlement in settlements)


def _are_short(texts: Iterable[bytes]) -> bool:
    return sum(map(len, texts)) <= _SHORT


def _takes_several_statements(settlement: Settlement) -> bool:
    return isinstance(settlement, Cancelled) or steps.follower(settlement) is not None or _waits(settlement)


def _waits(settlement: Settlement) -> bool:
    """Tell whether the job goes on as one that follows others."""
    return isinstance(settlement, Continued) and bool(settlement.then.follows)


class Origin(Protocol):
    """What a database comes from, and its connections."""

    @property
    def name(self) -> str: ...
    @property
    def busy_timeout(self) -> timedelta: ...
    @property
    def notify(self) -> bool: ...
    def sessions(self, patience: Patience) -> OwnSessions: ...
    def engine(self, sessions: OwnSessions, patience: Patience) -> Engine: ...
    def listening_connection(self, sessions: OwnSessions, patience: Patience) -> OwnConnection: ...
    def forget(self, database: PostgresDatabase) -> bool: ...


class PostgresDatabase:
    """One database, this process's connections to it, and everybody who waits for something in it."""

    def __init__(self, target: Origin) -> None:
        self.name = target.name
        self._target = target
        self.subscribers = DatabaseSubscribers()
        self.users = 0
        self.pid = os.getpid()
        self._timeout = target.busy_timeout
        self._process = new_process()
        self._silent_for = target.busy_timeout + _SILENCE
        self._patience = Patience(self._silent_for, self._distrust)
        self._notifies = self.wakes_with_the_commit = target.notify
        self._sessions = target.sessions(self._patience)
        self._engine = target.engine(self._sessions, self._patience)
        self._prompt = StepPool(self._engine, self.name, PROMPT, "workers-postgres", self._patience)
        self._patient = StepPool(self._engine, self.name, PATIENT, "workers-postgres-patient", self._patience)
        listen = partial(target.listening_connection, self._sessions, self._patience)
        listener = PostgresListener if target.notify else PostgresPoller
        self._listener = listener(self.name, self._process, listen, self.subscribers)
        self._place: Place | None = None
        self._lost_claims = LostClaims()

    def enqueue(self, begin: Begin, jobs: Sequence[NewJob]) -> Step[list[EnqueueResult]]:
        work, ask = partial(steps.enqueue, jobs=jobs), partial(steps.inserting, jobs=jobs)
        if len(jobs) <= _FEW:
            if _take_several_statements(jobs):
                return self.change(begin, work)
            return self._step(self._patient, begin, ask, is_short=_are_short(job.payload for job in jobs))

        def run(connection: Connection) -> list[EnqueueResult]:
            # Looked at in the thread, because there are many.
            if _take_several_statements(jobs):
                return self._changing(begin, work)(connection)
            return self._carrying_out(begin, ask)(connection)

        return self._submit(self._patient, run, self._silence(len(jobs)))

    async def enqueue_with(self, connection: object, begin: Begin, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        return await self.change_with(connection, begin, partial(steps.enqueue, jobs=jobs))

    def replace_cron(self, begin: Begin, row: CronRow, jobs: Sequence[NewJob]) -> Future[bool]:
        return self.change(begin, partial(crons.replace_cron, row=row, jobs=jobs, enqueue=steps.enqueue))

    def claim(self, begin: Begin, worker_id: str, leases: Mapping[str, timedelta], limit: int) -> Step[list[Claim]]:
        ask = partial(steps.claiming, worker_id=worker_id, leases=leases, limit=limit, lost=self._lost_claims)
        return self._step(self._prompt, begin, ask, jobs=limit)

    def claimable_in(self, begin: Begin, names: Collection[str]) -> Step[timedelta | None]:
        return self._step(self._prompt, begin, partial(steps.looking, names=names))

    def renew(self, begin: Begin, claims: Sequence[Claim]) -> Step[Renewal]:
        return self._step(self._prompt, begin, partial(steps.renewing, claims=claims), jobs=len(claims))

    def settle(self, begin: Begin, settlements: Sequence[Settlement]) -> Step[list[SettleOutcome]]:
        work = partial(steps.settle, settlements=settlements)
        if any(map(_takes_several_statements, settlements)):
            return self.change(begin, work)
        if any(map(fails, settlements)):
            return self._submit(self._prompt, self._changing(begin, work), self._silence(len(settlements)))
        ask = partial(steps.settling, settlements=settlements)
        jobs, is_short = len(settlements), _are_few_and_short(settlements)
        return self._step(self._prompt, begin, ask, jobs=jobs, is_short=is_short)

    def exchange(
        self,
        begin: Begin,
        settlements: Sequence[Settlement],
        worker_id: str,
        leases: Mapping[str, timedelta],
        limit: int,
    ) -> Step[Exchange] | None:
        following = [job for job in map(steps.follower, settlements) if job is not None]
        if not leases or any(isinstance(one, Cancelled) or fails(one) or _waits(one) for one in settlements):
            return None
        if _take_several_statements(following) or len({job.id for job in following}) < len(following):
            return None
        wanted = partial(steps.exchanging, worker_id=worker_id, leases=leases, limit=limit, lost=self._lost_claims)
        ask = partial(wanted, settlements=settlements)
        jobs = max(limit, len(settlements))
        is_short = _are_few_and_short(settlements) and _are_short(job.payload for job in following)
        # What is enqueued may wait for a caller's transaction.
        return self._step(self._patient if following else self._prompt, begin, ask, jobs=jobs, is_short=is_short)

    async def settle_with(
        self, connection: object, begin: Begin, settlements: Sequence[Settlement]
    ) -> list[SettleOutcome]:
        return await self.change_with(connection, begin, partial(steps.settle, settlements=settlements))

    def progress(self, begin: Begin, reports: Sequence[ProgressReport]) -> Step[None]:
        ask, is_short = partial(steps.reporting, reports=reports), _are_short(report.value for report in reports)
        return self._step(self._prompt, begin, ask, jobs=len(reports), is_short=is_short)

    def recover(self, begin: Begin, limit: int, max_stalls: int) -> Future[Recovery]:
        work = self._changing(begin, partial(recover, limit=limit, max_stalls=max_stalls))
        return self._submit(self._patient, work, self._silence(limit))

    def look(self, begin: Begin, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> Future[T]:
        # The first look of all opens a connection that an enqueue can use: many a producer needs no other.
        pool = self._prompt if self._patient.is_open else self._patient
        return self._submit(pool, self._stepping(begin, work), _AT_LEISURE if at_leisure else None)

    def change(self, begin: Begin, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> Future[T]:
        return self._submit(self._patient, self._changing(begin, work), _AT_LEISURE if at_leisure else None)

    def _changing(self, begin: Begin, work: Callable[[Transaction], T]) -> Callable[[Connection], T]:
        """Return what does the work in a transaction of several statements."""

        def run(connection: Connection) -> T:
            with self._transaction(connection) as direct:
                transaction = begin(direct)
                result = work(transaction)
                _tell(transaction)
                return result

        return run

    @contextmanager
    def _transaction(self, connection: Connection) -> Iterator[PostgresDirect]:
        direct = PostgresDirect(connection, alone=False)
        with connection.begin():
            self._sessions.begin_transaction(driver_of(connection))
            yield direct

    def _carrying_out(self, begin: Begin, ask: Callable[[Transaction], Asking[T]]) -> Callable[[Connection], T]:
        return self._stepping(begin, lambda transaction: run_blocking(transaction, ask(transaction)))

    def _stepping(self, begin: Begin, work: Callable[[Transaction], T]) -> Callable[[Connection], T]:
        """Return what does the work in one statement outside of any transaction, if the session is ours."""
        if self._notifies:
            return lambda connection: work(begin(PostgresDirect(connection, alone=True)))

        def run(connection: Connection) -> T:
            with self._transaction(connection) as direct:
                return work(begin(direct))

        return run

    async def change_with(self, connection: object, begin: Begin, work: Callable[[Transaction], T]) -> T:
        if self._place is None:  # `change_on` would ask as well, and block the event loop meanwhile
            await asyncio.wrap_future(self._ask_place())
        return await run_on(connection, lambda caller: self.change_on(caller, begin, work), self.name)

    def change_on(self, caller: Caller, begin: Begin, work: Callable[[Transaction], T]) -> T:
        ours = self._place or self._ask_place().result()
        with translated(self.name):
            connection = connection_of(caller)
            check(connection, ours, self.name)
            transaction = begin(PostgresJoined.of(connection))
            transaction.lasting = True
            result = work(transaction)
            _tell(transaction)
            return result

    def _ask_place(self) -> Future[Place]:
        def ask(transaction: Transaction) -> Place:
            found = place_of(transaction.connection)
            if found.schema is not None:  # else somebody may still migrate
                self._place = found
            return found

        return self._submit(self._patient, self._stepping(_look, ask))

    def enqueue_on(self, caller: Caller, begin: Begin, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        return self.change_on(caller, begin, partial(steps.enqueue, jobs=jobs))

    def refuse_nested(self) -> None:
        """Do nothing: other steps can run beside a caller's transaction."""

    def look_now(self) -> None:
        """Do nothing: the server tells everybody."""

    def wake(self, begin: Begin) -> Step[None]:
        return self._step(self._patient, begin, _wake)

    def hear(self) -> None:
        self._listener.start()

    async def subscribe(self, begin: Begin, queue: int, *, of_one_job: bool = False) -> None:
        await self.listen_for_cancels()
        if not self._listener.is_registered(queue):
            await outcome(self._step(self._patient, begin, self._register))

    async def listen_for_cancels(self) -> None:
        try:
            async with asyncio.timeout(self._timeout.total_seconds()):
                await asyncio.shield(asyncio.wrap_future(self._listener.start()))
        except TimeoutError:
            raise StorageUnavailable(f"{self.name} cannot be listened to; is it running?") from None

    def _register(self, transaction: Transaction) -> Asking[None]:
        yield _LISTEN, {"queue": transaction.queue, "process": self._process, "valid": REGISTERED}
        self._listener.registered(transaction.queue)

    async def release(self) -> None:
        if self._target.forget(self) and self.pid == os.getpid():  # a fork's copy belongs to the parent
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        until = time.monotonic() + _FAREWELL.total_seconds()
        self._patience.end(_FAREWELL)
        self._listener.stop(until)
        self._prompt.close(until)
        self._patient.close(until)
        self._engine.dispose()

    def _distrust(self) -> None:
        """Make nothing of the connections that nobody uses, and of the listener's only if it answers."""
        self._prompt.distrust()
        self._patient.distrust()
        self._listener.ask()

    def _silence(self, jobs: int) -> timedelta:
        return min(self._silent_for + _PER_JOB * min(jobs, _MANY), max(self._silent_for, _AT_LEISURE))

    def _step(
        self,
        pool: StepPool,
        begin: Begin,
        ask: Callable[[Transaction], Asking[T]],
        *,
        jobs: int = 1,
        is_short: bool = True,
    ) -> Step[T]:
        """Carry out what it asks for about so many jobs; unless it `is_short`, in a thread."""
        if jobs > _FEW or not is_short or not self._notifies:
            return self._submit(pool, self._carrying_out(begin, ask), self._silence(jobs))
        self._refuse_fork()
        return pool.step(begin, ask, self._silence(jobs))

    def _submit(self, pool: StepPool, run: Callable[[Connection], T], silence: timedelta | None = None) -> Future[T]:
        self._refuse_fork()
        return pool.submit(run, silence)

    def _refuse_fork(self) -> None:
        if self.pid != os.getpid():
            raise StorageError(f"{self.name} was opened before this process was forked; connect again")


def _tell(transaction: Transaction) -> None:
    """Let waiters and subscribers hear, with the commit, what the transaction has to announce."""
    wake = transaction.wake and not transaction.quiet
    if not (transaction.events or wake):
        return
    told = [text for event in transaction.events for text in _texts(transaction, event)]
    values = {"queue": transaction.queue, "events": told, "wake": wake, "sure": transaction.lasting}
    transaction.connection.execute(_TELL, values)
    _request_cancels(transaction)


def _wake(transaction: Transaction) -> Asking[None]:
    yield _TELL, {"queue": transaction.queue, "events": [], "wake": True, "sure": False}


def _texts(transaction: Transaction, event: Told) -> Iterator[str]:
    """Yield the event as `workers_tell` takes it, and in front of it the result that it has."""
    kind, job_id, result = event
    if result is not None:
        yield f"result:{base64.b64encode(result).decode()} {transaction.encode(job_id)}"
    yield f"{kind.value}:{transaction.encode(job_id)}"


def _request_cancels(transaction: Transaction) -> None:
    """Tell workers of the requests when they are committed; workers hear of them without being registered."""
    for kind, job_id, _ in transaction.events:
        if kind is JobEventKind.CANCEL_REQUESTED:
            request = f"{transaction.queue} {transaction.encode(job_id)}"
            transaction.connection.execute(_REQUEST_CANCEL, {"request": request})


def _look(connection: Executor) -> Transaction:
    """Make a transaction that belongs to no queue."""
    return Transaction(connection=connection, queue=0, clock=lambda _: 0)
