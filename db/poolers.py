"""Pools in front of PostgreSQL that lend its sessions for single transactions, as PgBouncer may, are refused.

Theory of operation. What is set and prepared in a session lasts as long as that does. Behind such a pool the next
transaction has another client's session, whose statements have the same names. The pool does not say what it is, but
the number of the server's process that a client is told at the start is the pool's own. Only then do two connections
find out: one that has a session keeps its process, and nobody else has it.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, Dialect, Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from db.url import DatabaseUrlError

if TYPE_CHECKING:
    import psycopg  # an extra

_ROUNDS: Final = 4
"""Others may use the pool at the same time, and get in between. Psycopg prepares what is asked more than five times."""
_NO_TRANSACTIONS: Final = "transaction blocks not allowed"
"""PgBouncer says so with the code that it has for outages, too."""
_PROCESS: Final = "SELECT pg_backend_pid()"


class LentSessionsError(DatabaseUrlError):
    """The database's sessions are no client's own; the message says what to do."""


def refuse_lent_sessions(engine: Engine) -> None:
    """Let this PostgreSQL engine look at its first connection before that is used, also by other listeners.

    To connect raises `LentSessionsError` if the sessions are lent.
    """
    is_own = False

    @event.listens_for(engine, "connect", insert=True)
    def look(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        nonlocal is_own
        if is_own:
            return
        driver: Any = record.driver_connection  # psycopg's
        try:
            if _is_lent(connection, driver.info, engine.dialect):
                raise LentSessionsError(_refusal(engine.url))
        except BaseException:
            connection.close()  # nobody else knows it yet
            raise
        is_own = True


def _refusal(url: URL) -> str:
    shown = URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database)
    return (
        f"the database {shown} is behind a pool that lends its sessions for single transactions, as PgBouncer does with"
        " `pool_mode = transaction`: what is prepared in one would be another's; give DATABASE_URL a pool with"
        " `pool_mode = session`, or the server itself"
    )


def _is_lent(connection: DBAPIConnection, told: psycopg.ConnectionInfo, dialect: Dialect) -> bool:
    from psycopg.errors import ProtocolViolation

    try:
        process = _process(connection)
        connection.rollback()
        if process == told.backend_pid:
            return False
        with closing(_another(told, dialect)) as other:
            return _are_shared(process, connection, other)
    except ProtocolViolation as error:
        if (error.diag.message_primary or "").startswith(_NO_TRANSACTIONS):  # it lends them for single statements
            return True
        raise


def _are_shared(process: int, connection: DBAPIConnection, other: DBAPIConnection) -> bool:
    """Tell whether one has ever had another process than at first, or one that the other has had.

    Each round counts with those before. A pool lends what came back last, or what came back first, and other clients
    may have put those two into an order in which each gets its own again: so they are given back in both orders.
    """
    held = None
    for number in range(_ROUNDS):
        before, held = held, _process(other)
        has_changed = process != _process(connection) or before not in (None, held)
        for each in (other, connection) if number % 2 == 0 else (connection, other):
            each.rollback()
        if has_changed or held == process:
            return True
    return False


def _process(connection: DBAPIConnection) -> int:
    """Ask in a transaction, which is left open."""
    cursor = connection.cursor()
    cursor.execute(_PROCESS)
    [(process,)] = cursor.fetchall()
    cursor.close()
    return int(process)


def _another(told: psycopg.ConnectionInfo, dialect: Dialect) -> DBAPIConnection:
    """Open a second connection like the first, which no pool of ours counts."""
    from db.silence import TaskConnection  # which a silent server does not keep

    how: dict[str, Any] = {"async_creator_fn": TaskConnection.connect} if dialect.is_async else {}
    opened: DBAPIConnection = dialect.connect(told.dsn, password=told.password or None, **how)
    return opened
