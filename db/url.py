"""Parse the URLs of databases, and choose the driver."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

_ACCEPTED = "sqlite:///path/to/file.db or postgresql://user:password@host:5432/name"

_SQLITE_OPTIONS: Final = frozenset(
    {"timeout", "isolation_level", "detect_types", "check_same_thread", "cached_statements", "uri"}
)


class DatabaseUrlError(ValueError):
    """The database URL names nothing we can open; the message says why, and never shows a password."""


def parse_url(text: str) -> URL:
    """Return the backend, address and options that `text` names; the driver it asks for is replaced by ours.

    `postgres://`, which Node applications write, means `postgresql://`.

    Raises:
        DatabaseUrlError: malformed, another backend, or an SQLite URL without a file in an existing directory.
    """
    try:
        url = make_url(text.replace("postgres://", "postgresql://", 1) if text.startswith("postgres://") else text)
    except (ArgumentError, ValueError):
        # Not chained: SQLAlchemy quotes the whole string, password included.
        raise DatabaseUrlError(f"the database URL cannot be parsed; write {_ACCEPTED}") from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        _require_file(url)
        _require_options(url, _SQLITE_OPTIONS)
        return url.set(drivername="sqlite")
    if backend == "postgresql":
        _require_options(url, _postgresql_options())
        return url.set(drivername="postgresql+psycopg")
    raise DatabaseUrlError(f"database backend {backend!r} is not supported; write {_ACCEPTED}")


def sqlite_file(text: str) -> Path | None:
    """Return the file that the URL `text` names, which need not be there yet; None if it names no SQLite database.

    Raises:
        DatabaseUrlError: as `parse_url`.
    """
    url = parse_url(text)
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def absent_file(text: str) -> Path | None:
    """Return the SQLite file that the URL `text` names, in full, if it is not there; None for any other URL."""
    if not text.startswith("sqlite"):
        return None
    file = sqlite_file(text)
    return None if file is None or file.exists() else file.absolute()


def _postgresql_options() -> Collection[str] | None:
    """Return what the installed libpq may be told; None without it, of which whoever connects tells.

    What psycopg takes beside that is no text.
    """
    try:
        from psycopg import pq  # here: only these URLs need the extra
    except ImportError:
        return None
    return {each.keyword.decode() for each in pq.Conninfo.get_defaults()}


def _require_options(url: URL, known: Collection[str] | None) -> None:
    unknown = [] if known is None else sorted(url.query.keys() - set(known))
    if known and unknown:
        name = unknown[0][:40]
        meant = "".join(f", or write {each!r}" for each in get_close_matches(name, sorted(known), n=1))
        raise DatabaseUrlError(f"the database URL has the unknown option {name!r}; leave it out{meant}")


def _require_file(url: URL) -> None:
    name = url.database or ":memory:"
    if name == ":memory:" or name.startswith("file:"):
        raise DatabaseUrlError(
            f"SQLite database {name!r} is not a plain file, which several connections can share;"
            " write sqlite:///path/to/file.db"
        )
    directory = Path(name).absolute().parent
    if not directory.is_dir():
        raise DatabaseUrlError(f"directory {directory} of the SQLite database does not exist; create it first")
