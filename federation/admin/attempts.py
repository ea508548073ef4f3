"""Attempts as the log has them, with the deliveries and servers that they were for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, Select, and_, literal, select, true, tuple_
from sqlmodel import col

from db import AttemptNote, AttemptOutcome, Database, DeliveryAttempt
from federation.admin.scans import MOST_SHOWN, CursorError, ListPage, Scan, small, timed_cursor, timed_key
from federation.admin.words import ended


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAttempt:
    """One attempt. `id` is its place in the log; `code` is None if it delivered, `remote_code` is what the server said.

    `note` is what neither of these tells, and `activity_id` what the activity is called that was sent, if it was one.

    `delivery_id`, `job_name` and `remote_code` may hold anything, because other programs and servers wrote them.
    """

    id: int
    delivery_id: str
    job_name: str
    server_url: str
    series: int | None
    attempt: int
    started_at: datetime
    duration_ms: int
    outcome: AttemptOutcome
    code: str | None
    remote_code: str | None
    http_status: int | None
    relayed_by: str | None
    note: AttemptNote | None
    activity_id: str | None

    @property
    def ended(self) -> str:
        """How it ended, in words."""
        return ended(self.outcome, self.note)


def logged_attempts() -> Select[*tuple[Any, ...]]:
    """Return the query for all attempts, for the caller to narrow down and to bound."""
    return select(*_COLUMNS)


def logged_attempt(row: Row[*tuple[Any, ...]]) -> LoggedAttempt:
    """Build the attempt of a row of `logged_attempts`."""
    return LoggedAttempt(**row._mapping)


async def newest_attempts(database: Database, number: int) -> list[LoggedAttempt]:
    """Return the last ones of the log, oldest first."""
    query = logged_attempts().order_by(col(DeliveryAttempt.id).desc()).limit(number)
    return [logged_attempt(row) for row in reversed(await database.rows(query))]


async def page_of_attempts(
    database: Database,
    *,
    server_url: str | None = None,
    outcome: AttemptOutcome | None = None,
    code: str | None = None,
    limit: int = 50,
    after: str | None = None,
) -> ListPage[LoggedAttempt]:
    """Return attempts, or those at one server, the latest first, from where the page before ended.

    With the outcome `delivered` this is the list of deliveries that arrived: they have no row any more.

    Raises:
        CursorError: *after* is no cursor.
    """
    wanted = [] if outcome is None else [col(DeliveryAttempt.outcome) == outcome]
    wanted += [] if code is None else [col(DeliveryAttempt.error_code) == code]
    scan = Scan(
        keys=_KEYS,
        ranges=[true() if server_url is None else col(DeliveryAttempt.server_url) == server_url],
        wanted=and_(*wanted) if wanted else None,
        descending=True,
    )
    keys, end = await scan.keys_of_page(database, limit=limit, after=timed_key(after, small))
    ids = [key[-1] for key in keys]
    found = {row.id: row for row in await database.rows(logged_attempts().where(col(DeliveryAttempt.id).in_(ids)))}
    rows = [logged_attempt(found[each]) for each in ids if each in found]
    return ListPage(rows=tuple(rows), after=timed_cursor(end))


async def attempts_at_delivery(
    database: Database, delivery_id: str, *, limit: int = 50, after: str | None = None
) -> ListPage[LoggedAttempt]:
    """Return the attempts at one delivery, the latest first, whether or not it still has a row.

    Raises:
        CursorError: *after* is no cursor.
    """
    limit = min(max(limit, 1), MOST_SHOWN)
    series, number = col(DeliveryAttempt.series), col(DeliveryAttempt.attempt)
    query = logged_attempts().where(col(DeliveryAttempt.delivery_id) == delivery_id)
    if after is not None:
        before = (literal(each) for each in _series_and_number(after))
        query = query.where(tuple_(series, number) < tuple_(*before))
    # The unique index is read backwards: there nulls come first on PostgreSQL, and last on SQLite.
    latest = query.order_by(series.desc(), number.desc()).limit(limit + 1)
    found = [logged_attempt(row) for row in await database.rows(latest)]
    shown = found[:limit]
    goes_on = len(found) > limit and shown[-1].series is not None
    return ListPage(rows=tuple(shown), after=f"{shown[-1].series}.{shown[-1].attempt}" if goes_on else None)


async def attempts_at_activity(database: Database, activity_id: str, *, limit: int = 20) -> list[LoggedAttempt]:
    """Return the last attempts at an activity's deliveries, the latest first."""
    latest = (col(DeliveryAttempt.started_at).desc(), col(DeliveryAttempt.id).desc())
    query = logged_attempts().where(col(DeliveryAttempt.activity_id) == activity_id).order_by(*latest).limit(limit)
    return [logged_attempt(row) for row in await database.rows(query)]


def _series_and_number(cursor: str) -> tuple[int, int]:
    series, _, number = cursor.partition(".")
    try:
        return small(series), small(number)
    except ValueError:
        raise CursorError from None


_TABLE: Final = DeliveryAttempt.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_KEYS: Final = (_TABLE.c.started_at, _TABLE.c.id)
_NAMES: Final = (
    *("id", "delivery_id", "job_name", "server_url", "series", "attempt", "started_at", "duration_ms", "outcome"),
    *("remote_code", "http_status", "relayed_by", "note", "activity_id"),
)
_COLUMNS: Final = (
    *(col(getattr(DeliveryAttempt, name)) for name in _NAMES),
    col(DeliveryAttempt.error_code).label("code"),
)
