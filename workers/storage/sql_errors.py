"""Database errors as ours: mapped by SQLite's result codes, never by their text."""

from __future__ import annotations

import sqlite3
from typing import Final

from sqlalchemy.exc import DBAPIError

from workers.errors import StorageError, StorageUnavailable, WorkersError

_LOCKED = "is locked by another connection; keep transactions short and pass `connection=` inside your own"

# Both kinds keep their SQLAlchemy error as the cause. Primary codes: https://www.sqlite.org/rescode.html
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
    sqlite3.SQLITE_ERROR: "does not have the expected tables; run `await storage.migrate()`",
}
_STALE = "was written to since the caller's transaction first read; roll that back and begin it as a writing one"


def is_busy(error: DBAPIError) -> bool:
    return _code(error) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def translate(error: DBAPIError, database: str) -> WorkersError:
    """What `error` means for a caller; `database` is named in it."""
    # A caller's engine may show bound values in its errors, and ours are payloads.
    error.hide_parameters = True
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
