"""The transactions that a step can join: the caller's own, or that of a session made for a handler.

Theory of operation. The statements run on the caller's connection, so they commit or vanish with its other writes.
Their effects are announced after the commit. When a session commits, it wakes the waiters of this process. A bare
connection tells nobody after its commit, so there the database's watcher wakes them, as after another process's, or
`when_committed` does. On SQLite the transaction holds the only write lock from then on: another step of ours from the
same task could only wait for itself, so it is refused at once.
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
"""What a step joins; of an asynchronous session or connection, the synchronous one inside it."""

SLOW_TRANSACTION: Final = timedelta(seconds=1)

_COMMITS_IN: Final = 0.001
_LOOKS: Final = 50
_LOG = logging.getLogger(__name__)


class Callers:
    """The callers' transactions on one database file that have jobs of ours in them."""

    def __init__(self, path: str, database: str) -> None:
        self._path = path
        self._database = database
        # Each task writes and reads only its own entry.
        self._open: WeakKeyDictionary[asyncio.Task[object], RootTransaction] = WeakKeyDictionary()

    def refuse_nested(self) -> None:
        """Raise if the running task holds such a transaction open.

        Raises:
            TransactionError: it holds one.
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
        """Do `work` in the caller's transaction. When a session commits it, `committed` is called.

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
    """Do `work` on the caller's `connection`, as SQLAlchemy's synchronous code sees it.

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
    """Translate database errors that leave the block into ours."""
    try:
        yield
    except DBAPIError as error:
        raise translate(error, database) from error
    except PoolTimeout as error:
        raise StorageUnavailable(f"no connection to {database} became free in time; keep transactions short") from error


def checked(connection: object) -> Caller:
    """Return the connection or session, which must be a synchronous one.

    Raises:
        TypeError: it is not.
    """
    if isinstance(connection, (Session, Connection)):
        return connection
    if isinstance(connection, (AsyncSession, AsyncConnection)):
        raise TypeError("plain code cannot use an asynchronous connection; `await` the enqueue in a coroutine instead")
    raise _no_connection(connection)


def connection_of(caller: Caller) -> Connection:
    """Return the connection of the caller's transaction.

    Raises:
        ValueError: it is in autocommit, where a rollback would leave what was written.
    """
    connection = caller.connection() if isinstance(caller, Session) else caller
    if connection._is_autocommit_isolation():  # nothing public knows what its engine was made with
        raise ValueError("this connection is in autocommit; begin a transaction, for what is written to be part of it")
    return connection


def real_path(path: str) -> str:
    """Return the one spelling of the file's path."""
    return str(Path(path).resolve())


def _running_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None


def when_committed(connection: object, tell: Callable[[], None]) -> None:
    """Call `tell` in this loop when a bare connection has committed its open transaction, or at once if it has none.

    Raises:
        TypeError: `connection` is not an SQLAlchemy connection or session.
    """
    if isinstance(connection, (AsyncSession, Session)):
        return  # a session is listened to from its first job on
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
        elif times:  # the watcher notices a commit that takes longer
            loop.call_later(_COMMITS_IN, look, times - 1)

    # SQLAlchemy has no event after a commit, only this one right before.
    event.listen(sync, "commit", lambda _: loop.call_soon_threadsafe(look, _LOOKS), once=True)


def _no_connection(connection: object) -> TypeError:
    return TypeError(
        "connection must be an SQLAlchemy Connection, AsyncConnection, Session or AsyncSession, not a"
        f" {type(connection).__module__}.{type(connection).__qualname__}; plain code (`sync`) takes those of Django,"
        " sqlite3 and psycopg 3 as well"
    )


# What to call when a session has committed a transaction. A session gets its listeners once and keeps them, because
# listeners cannot be removed while they run.
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
    """Sessions of the engine `given`, which stays open, or else of an engine made when first needed."""

    def __init__(self, given: AsyncEngine | None, make: Callable[[], AsyncEngine]) -> None:
        self._given = given
        self._make = make
        self._own: AsyncEngine | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncSession]:
        """Open a session that has done nothing yet; it is closed at the end."""
        engine = self._given or self._own
        if engine is None:
            engine = self._own = self._make()
        # No object expires at the commit: what the handler has loaded can still be read after the block.
        async with AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    async def dispose(self) -> None:
        """Close the connections that were made here."""
        own, self._own = self._own, None
        if own is not None:
            await own.dispose()
