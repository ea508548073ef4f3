"""Adopting deliveries that earlier versions gave up: what only its server's absence failed is owed again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from alembic import command
from sqlalchemy import DateTime, bindparam, select, text

from db import Database, DeliveryJob, DeliveryState, HoldReason
from db.engines import migration_engine
from db.migrate import _config, upgrade
from db.url import parse_url

NOW = datetime.now(UTC).replace(tzinfo=None, microsecond=0)
DAY = timedelta(days=1)
READY, HELD, FAILED = DeliveryState.READY, DeliveryState.HELD, DeliveryState.FAILED
SERVER, REST, OURS = HoldReason.SERVER, HoldReason.REST, HoldReason.OURS

INSERT = text(
    """INSERT INTO delivery_jobs
    (id, target_url, payload, attempts, created_at, job_name, server_url, settled_at, outcome, last_error, error_code)
    VALUES (:id, 'https://b.example/x', '{}', :attempts, :created_at, :job_name, 'https://b.example', :settled_at,
    :outcome, 'why', :error_code)"""
).bindparams(bindparam("created_at", type_=DateTime), bindparam("settled_at", type_=DateTime))


def before_outages(url: str) -> None:
    """The schema of the version before."""
    engine = migration_engine(parse_url(url))
    with engine.begin() as connection:
        command.upgrade(_config(connection), "0007")
    engine.dispose()


def add(url: str, rows: Mapping[str, dict[str, Any]]) -> None:
    values = {"attempts": 5, "created_at": NOW - 2 * DAY, "job_name": "deliver-post", "outcome": "retryable"}
    engine = migration_engine(parse_url(url))
    with engine.begin() as connection:
        for name, row in rows.items():
            connection.execute(INSERT, {**values, "settled_at": NOW - DAY, "error_code": None, "id": name, **row})
    engine.dispose()


def found(url: str) -> dict[str, DeliveryJob]:
    async def read() -> dict[str, DeliveryJob]:
        database = Database(url)
        async with database.read() as session:
            rows = {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}
        await database.close()
        return rows

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(asyncio.run, read()).result()


OWED_AGAIN = {
    **dict.fromkeys(("DNS_BLOCKED", "TIMEOUT", "CONN_REFUSED", "CONN_RESET", "TLS_ERROR", "UNKNOWN"), SERVER),
    **dict.fromkeys(("DISCOVERY", "HTTP_408", "HTTP_425", "HTTP_500", "HTTP_503", "HTTP_599"), SERVER),
    "HTTP_429": REST,
    "STALLED": OURS,
}
GIVEN_UP = ("HTTP_404", "HTTP_400", "HTTP_415", "NO_ACK", "NOT_JSON", "BODY_TOO_LARGE", "KEY_MATERIAL")


def test_what_failed_for_its_servers_absence_is_owed_again(database_url: str) -> None:
    """Held for it, as if it had just been; what was refused stays failed, with its end and its reason."""
    before_outages(database_url)
    add(database_url, {code: {"error_code": code} for code in (*OWED_AGAIN, *GIVEN_UP)})

    upgrade(database_url)

    rows = found(database_url)
    assert {code: (rows[code].state, rows[code].held_reason) for code in OWED_AGAIN} == {
        code: (HELD, reason) for code, reason in OWED_AGAIN.items()
    }
    assert {code: rows[code].state for code in GIVEN_UP} == dict.fromkeys(GIVEN_UP, FAILED)
    for code in OWED_AGAIN:
        row = rows[code]
        assert (row.settled_at, row.outcome, row.attempts, row.error_code) == (None, None, 5, code)
        assert row.held_at is not None
        assert row.held_at.replace(tzinfo=None) >= NOW
        assert (row.next_attempt_at is not None) is (row.held_reason in (REST, OURS))
    for code in GIVEN_UP:
        assert (rows[code].outcome, rows[code].held_at) == ("retryable", None)
        assert rows[code].settled_at is not None


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"settled_at": NOW - 8 * DAY}, FAILED),
        ({"job_name": None}, FAILED),
        ({"error_code": None}, FAILED),
        ({"settled_at": None, "outcome": None}, READY),
        ({"settled_at": None, "outcome": None, "error_code": None, "job_name": None}, READY),
    ],
    ids=["too-old", "of-a-node-producer", "of-unknown-reason", "open", "open-of-a-node-producer"],
)
def test_other_rows_stay_what_they_were(database_url: str, row: dict[str, Any], state: DeliveryState) -> None:
    """Given up or owed; an open one has its first job, or takes the first it meets."""
    before_outages(database_url)
    add(database_url, {"row": {"error_code": "TIMEOUT", **row}})

    upgrade(database_url)

    (after,) = found(database_url).values()
    assert (after.state, after.held_reason, after.series, after.job_id) == (state, None, 0, None)


def test_rows_of_producers_that_do_not_know_the_new_columns_are_ready(database_url: str) -> None:
    """The original implementation and earlier versions of this one go on writing beside it."""
    upgrade(database_url)
    add(database_url, {"row": {"settled_at": None, "outcome": None, "attempts": 0}})

    (row,) = found(database_url).values()
    assert (row.state, row.job_id, row.series, row.holds, row.sending) == (READY, None, 0, 0, None)
