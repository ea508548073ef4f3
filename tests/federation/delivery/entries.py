"""Rows, entries for the ledger, and what they left in the database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, text
from sqlmodel import col

from db import DEFAULT_WIRE, AttemptOutcome, Database, DeliveryAttempt, DeliveryJob, DeliveryState, HoldReason
from db.alone import Alone
from federation.delivery.ledger.attempt_log import AttemptRecord
from federation.delivery.ledger.entries import Begin, Begun, Ended, Series
from federation.delivery.ledger.ledger import Ledger
from federation.protocol.activities import parse_method
from federation.sealed.outbound.follows import FollowAnswer
from federation.servers.link_rules import Hold

SERVER = "https://b.example"
ACCEPTED = FollowAnswer(follower_id="user-a", following_id="user-b", server_url=SERVER, accepted=True)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LATER = NOW + timedelta(minutes=1)
DOWN = Hold(reason=HoldReason.SERVER, may_be_tried=True)


async def add_rows(database: Database, *ids: str, **values: Any) -> None:
    """Rows whose first job has their id, as the outbox writes them."""
    async with database.transaction() as session:
        session.add_all(
            DeliveryJob(
                **{
                    "id": each,
                    "target_url": f"{SERVER}/inbox",
                    "payload": f"text of {each}",
                    "created_at": NOW,
                    "job_name": "deliver-post",
                    "server_url": SERVER,
                    "job_id": each,
                    **values,
                }
            )
            for each in ids
        )


async def rows(database: Database) -> dict[str, DeliveryJob]:
    async with database.read() as session:
        return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}


async def attempts(database: Database) -> list[tuple[str, int | None, int, str, str | None]]:
    """Those on record: their delivery, series, number, outcome and code."""
    async with database.read() as session:
        found = (await session.execute(select(DeliveryAttempt).order_by(col(DeliveryAttempt.id)))).scalars()
        return [(each.delivery_id, each.series, each.attempt, each.outcome.value, each.error_code) for each in found]


async def run(database: Database, statement: str) -> None:
    async with database.transaction() as session:
        await session.execute(text(statement))


def beginning(
    row: str, *, job: str | None = None, attempt: int = 1, at: datetime = NOW, hold: Hold | None = None
) -> Begin:
    return Begin(
        delivery_id=row,
        job_id=job or row,
        job_name="deliver-post",
        server_url=SERVER,
        attempt=attempt,
        at=at,
        hold=hold,
    )


async def begun(ledger: Ledger, row: str, *, job: str | None = None, attempt: int = 1, at: datetime = NOW) -> Series:
    """The row's own job has begun an attempt."""
    began = await ledger.begin(beginning(row, job=job, attempt=attempt, at=at))
    assert isinstance(began, Begun)
    return began.series


def series_of(row: str, *, job: str | None = None, number: int = 0) -> Series:
    return Series(
        delivery_id=row,
        job_id=job or row,
        number=number,
        first_attempted_at=NOW,
        attempts=0,
        holds=0,
        canary_at=None,
        is_canary=False,
    )


def failed(series: Series, **changes: Any) -> Ended:
    values: dict[str, Any] = {
        "series": series,
        "state": DeliveryState.FAILED,
        "at": LATER,
        "code": "NO_ACK",
        "error": "no",
        "outcome": "permanent",
    }
    return Ended(**{**values, **changes})


def held(series: Series, reason: HoldReason = HoldReason.SERVER, **changes: Any) -> Ended:
    return failed(
        series, state=DeliveryState.HELD, reason=reason, code="TIMEOUT", outcome=AttemptOutcome.RETRYABLE, **changes
    )


def record(row: str, *, series: int = 0, attempt: int = 1, code: str | None = "NO_ACK") -> AttemptRecord:
    return AttemptRecord(
        delivery_id=row,
        job_name="deliver-post",
        method="FEDERATE_POST",
        server_url=SERVER,
        attempt=attempt,
        started_at=NOW,
        duration_ms=5,
        outcome=AttemptOutcome.DELIVERED if code is None else AttemptOutcome.PERMANENT,
        error_code=code,
        series=series,
    )


@contextmanager
def counted_commits() -> Iterator[list[object]]:
    """Every transaction committed meanwhile, on any engine, and every statement that commits by itself."""
    seen: list[object] = []

    def note(connection: Connection) -> None:
        seen.append(connection)

    async def noted(alone: Alone, statement: str, values: Mapping[str, object]) -> Sequence[Any]:
        rows = await run(alone, statement, values)
        if rows:  # it tells of each row that it changed
            seen.append(alone)
        return rows

    event.listen(Engine, "commit", note)
    run = Alone.run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Alone, "run", noted)
        try:
            yield seen
        finally:
            event.remove(Engine, "commit", note)


def any_activity(job_name: str, payload: str) -> str:
    """As the node's wires check what is to be owed, where every name is the sealed wire's."""
    parse_method(payload)
    return DEFAULT_WIRE
