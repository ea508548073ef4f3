"""What an error of the database means, told by types and codes; no driver's wording is looked at."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout


def is_outage(error: SQLAlchemyError) -> bool:
    """Whether the database could not be asked, or had no room or time; else it understood and refused the statement.

    The sqlite3 module has one type for both. Of the two only a statement that does not fit the tables has the code
    SQLITE_ERROR, so a missing table or column is no outage on either database.
    """
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return False
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR
