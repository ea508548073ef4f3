"""Questions to the application's database outside Spark: does it answer, and how far back do its attempts go?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import URL, ColumnElement, Connection, column, func, select, table
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from db.engines import reading_engine
from db.url import parse_url
from federation.analytics.data.pushdown import between
from federation.analytics.data.tables import TABLES
from federation.analytics.days import FIRST_DAY
from federation.analytics.errors import DatabaseUnavailable

_UNDEFINED_TABLE: Final = "42P01"
_WHAT_TO_CHECK: Final = "is DATABASE_URL, or --database, right, and the server up?"
_PATIENCE: Final = timedelta(seconds=4)
"""For the connection, and then for each answer."""


def check_database(url: str) -> None:
    """Check that the database answers and has the tables that are read.

    Call it before starting Spark, which takes seconds.

    Raises:
        DatabaseUnavailable: it does not answer within 10 s, or lacks them.
        DatabaseUrlError: `url` names no database.
    """
    with _connected(url) as connection:
        for name, each in TABLES.items():
            read: ColumnElement[object] = column(each.schema.names[0])
            connection.execute(select(read).select_from(table(name)).limit(1)).all()


def oldest_attempt(url: str) -> date | None:
    """Return the UTC day of the first attempt that is still logged, or None if there is none.

    Raises:
        DatabaseUnavailable: as `check_database`.
    """
    with _connected(url) as connection:
        earliest: ColumnElement[object] = func.min(column("started_at"))
        query = select(earliest).select_from(table("delivery_attempts"))
        first = connection.execute(query.where(*_dated(connection, FIRST_DAY, None))).scalar_one()
    if first is None or isinstance(first, datetime):
        return first and first.date()
    text = str(first)
    # SQLite's first text may be no date: the first of its month or year is early enough.
    for candidate in (text[:10], f"{text[:7]}-01", f"{text[:4]}-01-01"):
        with suppress(ValueError):
            return date.fromisoformat(candidate)
    return FIRST_DAY


def has_attempts(url: str, since: date | None, until: date | None) -> bool:
    """Tell whether there are attempts from `since` on and before `until`; None is no bound.

    Raises:
        DatabaseUnavailable: as `check_database`.
    """
    with _connected(url) as connection:
        identity: ColumnElement[object] = column("id")
        within = _dated(connection, since, until)
        found = select(identity).select_from(table("delivery_attempts")).where(*within).limit(1)
        return connection.execute(found).first() is not None


def _dated(connection: Connection, since: date | None, until: date | None) -> list[ColumnElement[bool]]:
    low, high = (None if day is None else datetime.combine(day, time()) for day in (since, until))
    return between("started_at", low, high, typed=connection.dialect.name != "sqlite")


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        # SQLite would create an empty database.
        raise DatabaseUnavailable(f"there is no database {parsed.database}; {_WHAT_TO_CHECK}")
    engine = reading_engine(parsed, connect_timeout=_PATIENCE, at_leisure=False)
    milliseconds = int(_PATIENCE.total_seconds() * 1000)
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {milliseconds}")
            else:
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {milliseconds}")
            yield connection
    except SQLAlchemyError as error:
        raise DatabaseUnavailable(_told(parsed, error)) from None
    finally:
        engine.dispose()


def _told(url: URL, error: SQLAlchemyError) -> str:
    """Describe the error in one line, which names the database and has no password in it."""
    shown = URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database)
    cause = error.orig if isinstance(error, DBAPIError) else error
    if getattr(cause, "sqlstate", None) == _UNDEFINED_TABLE or "no such table" in str(cause):
        return f"the database {shown} lacks tables of ours; `federation upgrade` makes them"
    # From its second line on, the driver gives advice; the first line names host and user, never the password.
    first_line = " ".join(str(cause).partition("\n")[0].split())
    return f"the database {shown} cannot be read ({first_line}); {_WHAT_TO_CHECK}"
