"""Tell what an error of the database means, by types and codes; no driver's wording is looked at."""

from __future__ import annotations

import sqlite3
from typing import Final

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout


def is_outage(error: SQLAlchemyError) -> bool:
    """Tell whether the database could not be asked, or had no room or time. Otherwise it refused the statement.

    The sqlite3 module has one type for both. Of the two only a statement that does not fit the tables has the code
    SQLITE_ERROR, so a missing table or column is no outage on either database.
    """
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return False
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR


_LOCAL_CAUSES: Final = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "its file cannot be read or written, as on a full or failing disk",
    sqlite3.SQLITE_CANTOPEN: "its file cannot be opened; may this user write to its directory?",
    sqlite3.SQLITE_READONLY: "its file, or the directory around it, is read-only",
    sqlite3.SQLITE_PERM: "its file is not this user's to open",
    sqlite3.SQLITE_BUSY: "another process keeps it locked",
    sqlite3.SQLITE_CORRUPT: "its file is damaged; restore it from a backup",
    sqlite3.SQLITE_NOTADB: "its file is no SQLite database",
}


def local_cause(error: SQLAlchemyError) -> str | None:
    """Say why an SQLite file cannot be worked with; None for other reasons and other databases."""
    code = getattr(error.orig if isinstance(error, DBAPIError) else None, "sqlite_errorcode", None)
    return None if code is None else _LOCAL_CAUSES.get(code & 0xFF)  # the rest of an extended code is detail


_REFUSALS: Final = {
    "25006": "it is read-only, or a standby",
    "42501": "its user has not the right",
    "53100": "the disk of its server is full",
}


def why_not_written(error: SQLAlchemyError) -> str:
    """Say in a few words why a write failed: by the error's type, if nothing better is known."""
    state = getattr(error.orig if isinstance(error, DBAPIError) else None, "sqlstate", None)
    return local_cause(error) or _REFUSALS.get(state or "") or type(error.__cause__ or error).__name__
