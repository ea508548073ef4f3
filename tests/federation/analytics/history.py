"""Rows of a small history, and putting them into a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

import sqlalchemy
from sqlalchemy import create_engine, insert

from db import BlacklistedServer, DeliveryAttempt, Server, ServerHealthEvent
from db.columns import FederationTable
from db.url import parse_url

DAY = date(2025, 3, 1)
SERVERS = [f"https://s{number}.example" for number in range(3)]

Row = Mapping[str, object]


def moment(day: int = 0, hour: float = 12) -> datetime:
    """On the day that is `day` after the first."""
    return datetime(DAY.year, DAY.month, DAY.day, tzinfo=UTC) + timedelta(days=day, hours=hour)


def attempt(number: int, at: datetime, **values: object) -> Row:
    return {
        "id": number,
        "delivery_id": f"delivery-{number}",
        "job_name": "deliver-post",
        "method": "FEDERATE_POST",
        "server_url": SERVERS[number % len(SERVERS)],
        "attempt": 1,
        "started_at": at,
        "duration_ms": 100 + number % 50,
        "outcome": "delivered",
        "error_code": None,
        "http_status": 200,
        "relayed_by": None,
        "request_bytes": 1000,
        "response_bytes": 300,
        **values,
    }


def attempts(per_day: int, days: int, *, first: int = 1) -> list[Row]:
    """`per_day` on each of `days` days, spread over the day, its first and last moment included."""
    last = timedelta(days=1) - timedelta(microseconds=1)
    return [
        attempt(first + day * per_day + number, moment(day, 0) + last * number / max(1, per_day - 1))
        for day in range(days)
        for number in range(per_day)
    ]


THREE_DAYS = [
    *(
        {**row, "outcome": "retryable", "error_code": "TIMEOUT", "http_status": None} if row["id"] % 7 == 0 else row
        for row in attempts(30, 3)
    ),
    attempt(500, moment(1), duration_ms=-5),
]
"""Some failed, and one impossible."""


def fill(url: str, attempt_rows: Sequence[Row] = ()) -> None:
    """The database has three servers, one of them blacklisted, two health events, and these attempts."""
    engine = create_engine(parse_url(url))
    with engine.begin() as connection:
        connection.execute(insert(Server.__table__), [server(number) for number in range(len(SERVERS))])
        connection.execute(
            insert(BlacklistedServer.__table__),
            [{"id": "b", "server_url": SERVERS[2], "created_at": moment(), "reason": "spam"}],
        )
        for state, other, at in (("healthy", "unhealthy", moment(0, 5)), ("unhealthy", "healthy", moment(0, 7))):
            change = {"server_url": SERVERS[1], "from_state": state, "to_state": other, "reason": "TIMEOUT", "at": at}
            connection.execute(insert(ServerHealthEvent.__table__), [change])
    engine.dispose()
    add(url, DeliveryAttempt, attempt_rows)


def server(number: int) -> Row:
    return {
        "id": f"server-{number}",
        "url": SERVERS[number],
        "public_key": f"signing-{number}",
        "encryption_public_key": f"sealing-{number}",
        "last_seen": moment(1),
        "created_at": moment(-10),
        "updated_at": moment(),
        "is_healthy": number != 1,
        "health_check_attempts": 0,
        "unhealthy_reason": None,
    }


def add(url: str, model: type[FederationTable], rows: Sequence[Row]) -> None:
    if rows:
        execute(url, insert(model.__table__), list(rows))  # type: ignore[attr-defined] # SQLModel's tables have one


def execute(url: str, statement: sqlalchemy.Executable, rows: list[Row] | None = None) -> None:
    engine = create_engine(parse_url(url))
    with engine.begin() as connection:
        connection.execute(statement, rows)
    engine.dispose()
