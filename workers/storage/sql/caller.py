"""The transactions a step can join: the caller's own, or that of a session made for a handler; announced at the commit.

Theory of operation. The statements run on the caller's connection, so they commit or vanish with its other writes.
Waiters of this process are woken by the session's commit; for a bare connection, which tells nobody after it committed,
by the database's watcher, at most 50 ms later, or by `when_committed`. On SQLite the transaction holds the only write
lock from then on: a step of ours from the same task could only wait for itself, so that is refused at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, RootTransaction, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from workers.errors import StorageError, StorageUnavailable, TransactionError
from workers.storage.sql.errors import translate

T = TypeVar("T")
Caller: TypeAlias = Session | Connection
"""Whose transaction a step joins; of an asynchronous one what is inside of it."""

SLOW_TRANSACTION: Final = timedelta(seconds=1)

_COMMITS_IN: Final = 0.001
_LOOKS: Final = 50
_LOG = logging.getLogger(__name__)


class Callers:
    """The callers' transactions on one database file that hold jobs of ours."""

    def __init__(self, path: str, database: str) -> None:
        self._path = path
        self._database = database
        # Written and read by each task for itself.
        self._open: WeakKeyDictionary[asyncio.Task[object], RootTransaction] = WeakKeyDictionary()

    def refuse_nested(self) -> None:
        """Nothing happens unless the running task holds such a transaction open.

        Raises:
            TransactionError: it does.
        """
        task = _running_task()
        transaction = self._open.get(task) if task is not None else None
        if task is None or transaction is None:
            return
        if transaction.is_active:
            raise TransactionError(
                f"this task's own transaction holds the write lock of {self._database}: pass it as `connection=`,"
                " or end it first"
            )
        del self._open[task]

    def join(self, caller: Caller, work: Callable[[Connection], T], committed: Callable[[], None]) -> T:
        """`work` is done in the caller's transaction; `committed` is called when a session commits it.

        Raises:
            StorageError: it belongs to another database.
        """
        connection = connection_of(caller)
        self._check(connection)
        result = work(connection)
        transaction = connection.get_transaction()
        if transaction is not None:
            self._watch(transaction)
            if isinstance(caller, Session):
                _after_commit(caller, transaction, committed)
        return result

    def _check(self, connection: Connection) -> None:
        url = connection.engine.url
        if url.get_backend_name() != "sqlite" or real_path(url.database or "") != self._path:
            raise StorageError(f"`connection` belongs to another database than the jobs; pass one of {self._database}")

    def _watch(self, transaction: RootTransaction) -> None:
        task = _running_task()
        if task is not None and self._open.get(task) is not transaction:
            self._open[task] = transaction
            asyncio.get_running_loop().call_later(SLOW_TRANSACTION.total_seconds(), self._warn, transaction)

    def _warn(self, transaction: RootTransaction) -> None:
        if transaction.is_active:
            _LOG.warning(
                "a transaction with jobs in it holds the write lock of %s for more than %s: nothing can be enqueued,"
                " claimed or settled meanwhile; do slow work outside of it",
                self._database,
                SLOW_TRANSACTION,
            )


async def run_on(connection: object, work: Callable[[Caller], T], database: str) -> T:
    """`work` was done on the caller's `connection`, as SQLAlchemy's synchronous code sees it.

    Raises:
        TypeError: it is not an SQLAlchemy connection or session.
    """
    with translated(database):
        if isinstance(connection, AsyncSession):
            return await connection.run_sync(work)
        if isinstance(connection, AsyncConnection):
            return await connection.run_sync(work)
        return work(checked(connection))


@contextmanager
def translated(database: str) -> Iterator[None]:
    """Errors of the database leave the block as ours."""
    try:
        yield
    except DBAPIError as error:
        raise translate(error, database) from error
    except PoolTimeout as error:
        raise StorageUnavailable(f"no connection to {database} became free in time; keep transactions short") from error


def checked(connection: object) -> Caller:
    """The connection or session, which must be a synchronous one.

    Raises:
        TypeError: it is not.
    """
    if isinstance(connection, (Session, Connection)):
        return connection
    raise _no_connection(connection)


def connection_of(caller: Caller) -> Connection:
    """The connection of the caller's transaction."""
    return caller.connection() if isinstance(caller, Session) else caller


def real_path(path: str) -> str:
    """One spelling for each file."""
    return str(Path(path).resolve())


def _running_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None


def when_committed(connection: object, tell: Callable[[], None]) -> None:
    """`tell` is called in this loop when a bare connection has committed its open transaction; at once without one.

    Raises:
        TypeError: `connection` is not an SQLAlchemy connection or session.
    """
    if isinstance(connection, (AsyncSession, Session)):
        return  # is listened to from its first job on
    if not isinstance(connection, (Connection, AsyncConnection)):
        raise _no_connection(connection)
    sync = connection.sync_connection if isinstance(connection, AsyncConnection) else connection
    transaction = None if sync is None else sync.get_transaction()
    if sync is None or transaction is None or not transaction.is_active:
        tell()
        return
    loop = asyncio.get_running_loop()

    def look(times: int) -> None:
        if not transaction.is_active:
            tell()
        elif times:  # a commit that takes longer is left to the watcher
            loop.call_later(_COMMITS_IN, look, times - 1)

    # There is no event after a commit, only this one right before.
    event.listen(sync, "commit", lambda _: loop.call_soon_threadsafe(look, _LOOKS), once=True)


def _no_connection(connection: object) -> TypeError:
    return TypeError(
        f"connection must be an SQLAlchemy Connection, AsyncConnection, Session or AsyncSession, not {type(connection)}"
    )


# What to do when a session has committed a transaction. A session is listened to once, for good: listeners cannot be
# taken off while they run.
_pending: WeakKeyDictionary[Session, tuple[RootTransaction, set[Callable[[], None]]]] = WeakKeyDictionary()
_listened: WeakSet[Session] = WeakSet()


def _after_commit(session: Session, transaction: RootTransaction, committed: Callable[[], None]) -> None:
    known = _pending.get(session)
    if known is None or known[0] is not transaction:
        known = _pending[session] = (transaction, set())
    known[1].add(committed)
    if session not in _listened:
        _listened.add(session)
        event.listen(session, "after_commit", _on_commit)
        event.listen(session, "after_rollback", _on_rollback)


def _on_commit(session: Session) -> None:
    known = _pending.get(session)
    if known is None or known[0].is_active:  # a savepoint ended, the transaction goes on
        return
    del _pending[session]
    for committed in known[1]:
        committed()


def _on_rollback(session: Session) -> None:
    known = _pending.get(session)
    if known is not None and not known[0].is_active:
        del _pending[session]


class Sessions:
    """Of the engine `given`, which stays open, or of one that is made when first needed."""

    def __init__(self, given: AsyncEngine | None, make: Callable[[], AsyncEngine]) -> None:
        self._given = given
        self._make = make
        self._own: AsyncEngine | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncSession]:
        """A session that has done nothing yet, and is closed at the end."""
        engine = self._given or self._own
        if engine is None:
            engine = self._own = self._make()
        # Nothing expires: what the handler has loaded can be read after the block too.
        async with AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    async def dispose(self) -> None:
        """The connections made here are closed."""
        own, self._own = self._own, None
        if own is not None:
            await own.dispose()
