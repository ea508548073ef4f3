"""Attempts as the log has them, with the deliveries and servers that they were for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, Select, select
from sqlmodel import col

from db import AttemptOutcome, Database, DeliveryAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAttempt:
    """One attempt. `id` is its place in the log; `code` is None if it delivered, `remote_code` is what the server said.

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


_NAMES: Final = (
    *("id", "delivery_id", "job_name", "server_url", "series", "attempt", "started_at", "duration_ms", "outcome"),
    *("remote_code", "http_status", "relayed_by"),
)
_COLUMNS: Final = (
    *(col(getattr(DeliveryAttempt, name)) for name in _NAMES),
    col(DeliveryAttempt.error_code).label("code"),
)
