"""Single statements of PostgreSQL, on the driver itself: a quarter of what one costs through SQLAlchemy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

if TYPE_CHECKING:
    from psycopg import AsyncConnection  # an extra

TRIED_AFTER_SECONDS: Final = 1.0
"""A connection that lay idle for longer is tried before it is used, as those of the pool are."""


class Alone:
    """Statements that commit by themselves, one at a time, on one connection, which is kept, of `engine`'s pool."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()
        self._held: PoolProxiedConnection | None = None
        self._used = 0.0
        self._is_closed = False

    async def run(self, statement: str, values: Mapping[str, object]) -> Sequence[Any]:
        """Return the rows, as named tuples of what the driver makes of their values.

        Raises:
            DBAPIError: as SQLAlchemy raises it, without the parameters and without the lines that quote a row.
        """
        from psycopg import Error

        async with self._turn:
            sent = None
            try:
                connection = await self._connection()
                sent = statement
                return await _rows(connection, statement, values)
            except BaseException as error:
                await self._give_back(broken=not _is_about_statement(error))
                if isinstance(error, Error):
                    raise self._translated(sent, error, Error) from error
                raise
            finally:
                self._used = asyncio.get_running_loop().time()
                if self._is_closed:
                    await self._give_back(broken=True)  # the pool is closed

    async def close(self) -> None:
        """Give the connection back after the statement that runs, also if this is cancelled while it waits for that."""
        self._is_closed = True
        async with self._turn:
            await self._give_back()

    async def _connection(self) -> AsyncConnection[Any]:
        is_idle = asyncio.get_running_loop().time() - self._used > TRIED_AFTER_SECONDS
        if self._held is not None and is_idle and not await _answers(_driver(self._held)):
            await self._give_back(broken=True)
        if self._held is None:
            self._held = await self._engine.raw_connection()
            await _driver(self._held).set_autocommit(True)
        return _driver(self._held)

    async def _give_back(self, *, broken: bool = False) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        try:
            if not broken:
                await _driver(held).set_autocommit(False)
        except BaseException as error:  # it is of no use any more
            broken = True
            if not isinstance(error, Exception):
                raise
        finally:
            await greenlet_spawn(held.invalidate if broken else held.close)

    def _translated(self, statement: str | None, error: Exception, base: type[Exception]) -> BaseException:
        if statement is not None:
            error.args = (str(error).partition("\n")[0],)  # the lines after it quote the row, and so a payload
        return DBAPIError.instance(statement, None, error, base, hide_parameters=True, dialect=self._engine.dialect)


def _driver(held: PoolProxiedConnection) -> AsyncConnection[Any]:
    return cast("AsyncConnection[Any]", held.driver_connection)


async def _rows(connection: AsyncConnection[Any], statement: str, values: Mapping[str, object]) -> Sequence[Any]:
    from psycopg.rows import namedtuple_row

    async with connection.cursor(row_factory=namedtuple_row) as cursor:
        await cursor.execute(statement, values)
        return await cursor.fetchall()


async def _answers(connection: AsyncConnection[Any]) -> bool:
    from psycopg import Error

    from db.silence import impatient

    try:
        with impatient(connection):
            await connection.execute("")
    except Error:
        return False
    return True


def _is_about_statement(error: BaseException) -> bool:
    """Tell whether the connection is as good as before, as the server has refused what was asked."""
    from psycopg import DatabaseError, OperationalError

    return isinstance(error, DatabaseError) and not isinstance(error, OperationalError)
