"""Translation of database errors, by SQLite's result codes and PostgreSQL's SQLSTATE, never by their text."""

from __future__ import annotations

import sqlite3
from typing import Final

from sqlalchemy.exc import DBAPIError

from workers.errors import StorageError, StorageUnavailable, WorkersError

_LOCKED = "is locked by another connection; keep transactions short and pass `connection=` inside your own"

# The translated error keeps the SQLAlchemy error as its cause. Primary codes: https://www.sqlite.org/rescode.html
_UNAVAILABLE: Final[dict[int, str]] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_NOMEM: "cannot be used: out of memory",
    sqlite3.SQLITE_INTERRUPT: "was interrupted",
    sqlite3.SQLITE_IOERR: "has a disk I/O error; check the disk and its mount",
    sqlite3.SQLITE_FULL: "is on a full disk; free some space",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; check its directory, its permissions and the limit of open files",
    sqlite3.SQLITE_PROTOCOL: "is contended; too many processes open it at once",
    sqlite3.SQLITE_SCHEMA: "is being migrated",
}
_REFUSED: Final[dict[int, str]] = {
    sqlite3.SQLITE_PERM: "may not be accessed; check its permissions",
    sqlite3.SQLITE_READONLY: "is read-only; check the permissions of the file and its directory",
    sqlite3.SQLITE_CORRUPT: "is damaged; restore a backup",
    sqlite3.SQLITE_NOTADB: "is not an SQLite database; check the path",
    sqlite3.SQLITE_TOOBIG: "cannot hold a value of this size",
    sqlite3.SQLITE_ERROR: "does not have the expected tables; run `await storage.migrate()` or undo what was changed",
}
_STALE = "was written to since the caller's transaction first read; roll that back and begin it as a writing one"


# By SQLSTATE, or its class; https://www.postgresql.org/docs/current/errcodes-appendix.html
_UNAVAILABLE_STATES: Final[dict[str, str]] = {
    "08": "cannot be reached",
    "0A000": "was migrated since this connection was opened, or lacks what the queue needs",
    "40": "undid the step for another one that ran at the same time",
    # A deduplication key was taken after the snapshot of a caller's transaction above READ COMMITTED.
    "23505": "undid the step for another one that ran at the same time",
    "53": "is short of memory, disk or connections",
    "57": "is shutting down, starting up or cancelled the step",
    "58": "has a system error",
    "55P03": _LOCKED,
    "25006": "is read-only at present",
}
_LENT: Final = "lacks what was prepared: a pool in front of it lends sessions for single transactions; see `notify=off`"
_REFUSED_STATES: Final[dict[str, str]] = {
    "26000": _LENT,
    "42P05": _LENT,
    "28": "does not let us in; check user and password",
    "3D000": "does not exist; create it first",
    "42501": "does not grant what the queue needs; check the user's privileges",
    "42703": "does not have the expected columns; somebody changed the workers_* tables",
    "42P01": "does not have the expected tables; run `await storage.migrate()`",
    "42883": "does not have the expected functions; run `await storage.migrate()`",
    "25P02": "already failed a statement of the caller's transaction; roll that back",
}


def is_busy(error: DBAPIError) -> bool:
    return _code(error) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def translate(error: DBAPIError, database: str) -> WorkersError:
    """Return the error that `error` means for a caller; its message names `database`."""
    # A caller's engine may quote bound values in its errors, and ours are payloads.
    error.hide_parameters = True
    if _is_postgres(error):
        return _translate_postgres(error, database)
    code = _code(error)
    if code == sqlite3.SQLITE_BUSY_SNAPSHOT:
        return StorageUnavailable(f"{database} {_STALE}")
    if reason := _UNAVAILABLE.get(code & 0xFF):
        return StorageUnavailable(f"{database} {reason}")
    return StorageError(f"{database} {_REFUSED.get(code & 0xFF, f'refused (SQLite code {code})')}")


def _code(error: DBAPIError) -> int:
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is None and error.orig is not None:
        # aiosqlite's errors arrive wrapped by SQLAlchemy's adapter.
        code = getattr(error.orig.__cause__, "sqlite_errorcode", None)
    return code if isinstance(code, int) else 0


def _is_postgres(error: DBAPIError) -> bool:
    return hasattr(error.orig, "sqlstate")


def _translate_postgres(error: DBAPIError, database: str) -> WorkersError:
    _shorten(error)
    state = getattr(error.orig, "sqlstate", None)
    if state is None:  # the connection was lost, or never made
        return StorageUnavailable(f"{database} cannot be reached")
    if reason := _UNAVAILABLE_STATES.get(state, _UNAVAILABLE_STATES.get(state[:2])):
        return StorageUnavailable(f"{database} {reason} (SQLSTATE {state})")
    reason = _REFUSED_STATES.get(state, _REFUSED_STATES.get(state[:2], "refused"))
    return StorageError(f"{database} {reason} (SQLSTATE {state})")


def _shorten(error: DBAPIError) -> None:
    """Cut the error to its first line: the lines after it (DETAIL, CONTEXT) may quote a payload."""
    if error.orig is not None:
        whole = str(error.orig)
        first_line = whole.partition("\n")[0]
        error.orig.args = (first_line,)
        error.args = (str(error.args[0]).replace(whole, first_line),)
