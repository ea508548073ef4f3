"""Our own statements on the driver's connection to an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from workers.storage.sql.direct import Answer, Direct, Values


class SqliteDirect(Direct):
    """See `Direct`."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        found: object = connection.connection.dbapi_connection
        assert isinstance(found, sqlite3.Connection)
        self._driver = found

    def _once(self, sql: str, values: Values) -> Answer:
        return _answer(sql, lambda: self._driver.execute(sql, values))

    def _for_each(self, sql: str, values: Sequence[Values]) -> Answer:
        return _answer(sql, lambda: self._driver.executemany(sql, values))


def _answer(sql: str, carry_out: Callable[[], sqlite3.Cursor]) -> Answer:
    try:
        cursor = carry_out()
        if cursor.description is None:
            return Answer((), (), cursor.rowcount)
        return Answer(tuple([column[0] for column in cursor.description]), cursor.fetchall(), cursor.rowcount)
    except sqlite3.Error as error:
        raise DBAPIError(sql, None, error, hide_parameters=True) from error
