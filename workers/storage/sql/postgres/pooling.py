"""Whether a pool stands between us and PostgreSQL that lends its sessions for single transactions.

Theory of operation. Such a pool (PgBouncer's `pool_mode = transaction`) takes LISTEN, and what it is told by SET or
PREPARE, for another client's session: wake-ups never come, and limits are others'. It does not say what it is. But the
number of the server's process that a client is told at the start is the pool's own there. Then two connections find
out: one that has a session keeps its process, and nobody else has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import psycopg

from workers.errors import StorageError
from workers.storage.sql.postgres.silence import OwnConnection

_ROUNDS: Final = 5
"""Others may use the pool at the same time, and get in between."""
_PROCESS: Final = "SELECT pg_backend_pid()"
_SAID: Final = (
    "is behind a pool that lends its sessions for single transactions, as PgBouncer does with `pool_mode ="
    " transaction`: wake-ups would get lost there; use one with `pool_mode = session`, or add `notify=off` to the URL"
)


def refuse_lent_sessions(connection: OwnConnection, connect: Callable[[], OwnConnection], database: str) -> None:
    """Refuse a server whose sessions are no client's own; nothing is asked of one that no pool is in front of.

    Raises:
        StorageError: it is such a one.
    """
    process = _process(connection)
    connection.commit()
    if process != connection.info.backend_pid and _are_lent(connection, connect):
        raise StorageError(f"{database} {_SAID}")


def _are_lent(connection: OwnConnection, connect: Callable[[], OwnConnection]) -> bool:
    with connect() as other:
        for _ in range(_ROUNDS):
            first = _process(connection)
            connection.commit()
            try:
                with other.transaction():
                    held = _process(other)
                    second = _process(connection)
            except psycopg.errors.ProtocolViolation:  # not even transactions: it lends them for single statements
                return True
            finally:
                connection.commit()
            if first != second or held == first:
                return True
    return False


def _process(connection: OwnConnection) -> int:
    row = connection.execute(_PROCESS).fetchone()
    assert row is not None
    return int(str(row[0]))
