"""A copy of an SQLite database as it was at one moment, made while processes write to it."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

_BUSY_SECONDS: Final = 30.0
_SOUND: Final = [("ok",)]


class BackupError(Exception):
    """No backup was made; the message says why. Nothing is left of the attempt."""


def back_up(source: Path, file: Path) -> int:
    """Write all that is committed in the SQLite database `source` to `file`, which is new; return its size in bytes.

    The copy is of one moment and makes no writer wait. Its owner alone can read it. It is whole, checked and on the
    disk before it has its name: a crash leaves at most a `.<name>.*` beside it. Blocking.

    Raises:
        BackupError: `file` exists; `source` is not there, is no database, or is damaged; or the disk is full.
        OSError: the directory cannot be written to.
    """
    if not source.is_file():
        raise BackupError(f"there is no database {source}")
    _require_new(file)
    with _temporary(file) as temporary:
        try:
            _copy(source, temporary)
            _check(temporary)
        except sqlite3.Error as error:
            # Its code, not its text, which may quote what the database keeps.
            why = getattr(error, "sqlite_errorname", type(error).__name__)
            raise BackupError(f"the database {source} could not be copied to {file} ({why})") from error
        size = temporary.stat().st_size
        _give_name(temporary, file)
    return size


def _copy(source: Path, target: Path) -> None:
    """Copy all pages in one step, inside a read transaction: between steps a commit of others would start it anew."""
    with closing(_connect(source)) as reader, closing(_connect(target)) as writer:
        reader.execute("PRAGMA query_only = ON")
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        # Nobody sees the file before it is whole, so a journal of it would be of no use.
        writer.execute("PRAGMA journal_mode = OFF")
        reader.backup(writer)


def _check(copy: Path) -> None:
    # `immutable`: no log is put beside the file, which nobody else knows.
    with closing(_connect(f"file:{quote(str(copy.absolute()))}?immutable=1", uri=True)) as connection:
        if connection.execute("PRAGMA integrity_check").fetchall() != _SOUND:
            raise BackupError("the database is damaged, and so is a copy of it; `PRAGMA integrity_check` says where")


def _connect(database: Path | str, *, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(database, timeout=_BUSY_SECONDS, isolation_level=None, uri=uri)


@contextmanager
def _temporary(file: Path) -> Iterator[Path]:
    """Make an empty file beside `file`, readable by its owner alone, and remove it afterwards."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _give_name(temporary: Path, file: Path) -> None:
    _sync(temporary)
    try:
        os.link(temporary, file)  # unlike a rename it replaces nothing
    except FileExistsError:
        _require_new(file)
    except OSError:  # a file system without links
        _require_new(file)
        os.rename(temporary, file)
    _sync(file.parent)


def _require_new(file: Path) -> None:
    if os.path.lexists(file):
        raise BackupError(f"{file} exists and stays as it is")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
