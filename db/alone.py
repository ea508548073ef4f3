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

KEPT_SECONDS: Final = 1.0
"""A connection that lay idle for longer goes back to the pool, which tries one before it hands it out again."""


class Alone:
    """Statements that commit by themselves, one at a time, on one connection of `engine`'s pool while they are many."""

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
            try:
                return await self._run(statement, values)
            except BaseException as error:
                await self._give_back(broken=not _is_about_statement(error))
                if isinstance(error, Error):
                    raise self._translated(statement, error, Error) from error
                raise
            finally:
                self._used = asyncio.get_running_loop().time()
                if self._is_closed:
                    await self._give_back(broken=True)  # the pool is closed, and would keep it

    async def close(self) -> None:
        """Give the connection back after the statement that runs, also if this is cancelled while it waits for that."""
        self._is_closed = True
        async with self._turn:
            await self._give_back()

    async def _run(self, statement: str, values: Mapping[str, object]) -> Sequence[Any]:
        from psycopg.rows import namedtuple_row

        async with (await self._connection()).cursor(row_factory=namedtuple_row) as cursor:
            await cursor.execute(statement, values)
            return await cursor.fetchall()

    async def _connection(self) -> AsyncConnection[Any]:
        if self._held is not None and asyncio.get_running_loop().time() - self._used > KEPT_SECONDS:
            await self._give_back()
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

    def _translated(self, statement: str, error: Exception, base: type[Exception]) -> BaseException:
        error.args = (str(error).partition("\n")[0],)  # the lines after it quote the row, and so a payload
        return DBAPIError.instance(statement, None, error, base, hide_parameters=True, dialect=self._engine.dialect)


def _driver(held: PoolProxiedConnection) -> AsyncConnection[Any]:
    return cast("AsyncConnection[Any]", held.driver_connection)


def _is_about_statement(error: BaseException) -> bool:
    """Tell whether the connection is as good as before, as the server has refused what was asked."""
    from psycopg import DatabaseError, OperationalError

    return isinstance(error, DatabaseError) and not isinstance(error, OperationalError)
