"""The attempt log: late by a second at most, bounded, and patient with its database."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, text
from sqlmodel import col
from structlog.testing import capture_logs

from db import AttemptOutcome, Database, DeliveryAttempt
from federation.delivery.ledger import attempt_log as attempts
from federation.delivery.ledger.attempt_log import AttemptLog, AttemptRecord
from federation.runtime.composition import Federation
from tests.patience import PATIENCE_SECONDS, eventually, until


@pytest.fixture
async def database(federation: Federation) -> Database:
    return federation.database


def attempt(delivery_id: str, *, job_name: str = "deliver-post") -> AttemptRecord:
    return AttemptRecord(
        delivery_id=delivery_id,
        job_name=job_name,
        method="FEDERATE_POST",
        server_url="https://b.example",
        attempt=1,
        started_at=datetime.now(UTC),
        duration_ms=1,
        outcome=AttemptOutcome.DELIVERED,
    )


async def written(database: Database) -> list[str]:
    async with database.read() as session:
        query = select(col(DeliveryAttempt.delivery_id)).order_by(col(DeliveryAttempt.id))
        return list((await session.execute(query)).scalars())


async def rename(database: Database, old: str, new: str) -> None:
    async with database.transaction() as session:
        await session.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))


async def until_written(database: Database, count: int) -> None:
    """There are so many rows."""
    await eventually(lambda: written(database), lambda rows: len(rows) >= count)


async def test_an_attempt_is_written_by_itself(database: Database) -> None:
    """Nobody needs to ask for it, and another one later is written as well, each half a second after it."""
    assert timedelta(seconds=0.5) == attempts.FLUSH_INTERVAL
    log = AttemptLog(database)

    log.add(attempt("first"))
    await until_written(database, 1)
    log.add(attempt("second"))
    await until_written(database, 2)

    assert await written(database) == ["first", "second"]


async def test_adding_does_not_wait(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand attempts cost one transaction, later."""
    monkeypatch.setattr(attempts, "FLUSH_INTERVAL", timedelta(hours=1))
    log = AttemptLog(database)

    for number in range(1_000):
        log.add(attempt(f"row-{number}"))
    assert await written(database) == []
    await log.close()

    assert await written(database) == [f"row-{number}" for number in range(1_000)]


async def test_closing_writes_at_once_and_may_be_repeated(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was added just before is not lost, and the log can be used further."""
    log = AttemptLog(database)
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "FLUSH_INTERVAL", timedelta(hours=1))
        log.add(attempt("first"))
        await asyncio.wait_for(log.close(), PATIENCE_SECONDS)
    assert await written(database) == ["first"]

    await log.close()
    log.add(attempt("second"))
    await until_written(database, 2)


async def test_closing_during_a_flush_writes_nothing_twice(database: Database) -> None:
    """However the two meet, every attempt is in the log once."""
    log = AttemptLog(database)
    for number in range(200):
        log.add(attempt(f"row-{number}"))
    closing = [asyncio.create_task(log.close()) for _ in range(3)]
    await asyncio.sleep(0)
    log.add(attempt("row-200"))

    await asyncio.gather(*closing)
    await log.close()

    assert await written(database) == [f"row-{number}" for number in range(201)]


async def test_a_database_that_is_away_costs_no_attempt(database: Database) -> None:
    """While it refuses, attempts wait in order; `close` does not hang; all are written once it is back."""
    log = AttemptLog(database)
    await rename(database, "delivery_attempts", "hidden")
    with capture_logs() as lines:
        log.add(attempt("first"))
        await asyncio.wait_for(log.close(), PATIENCE_SECONDS)
    assert [(line["event"], line["waiting"]) for line in lines] == [("attempt_log_not_written", 1)]

    await rename(database, "hidden", "delivery_attempts")
    log.add(attempt("second"))
    await until_written(database, 2)

    assert await written(database) == ["first", "second"]


async def test_the_log_comes_back_by_itself(database: Database) -> None:
    """Without another attempt or a `close`, what waited is written when the database is back."""
    log = AttemptLog(database)
    await rename(database, "delivery_attempts", "hidden")
    with capture_logs() as lines:
        log.add(attempt("first"))
        await until(lambda: lines)
    await rename(database, "hidden", "delivery_attempts")

    await until_written(database, 1)


async def test_what_waits_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the oldest go, which is logged, and the newest are written when the database is back."""
    monkeypatch.setattr(attempts, "MAX_BUFFERED", 50)
    monkeypatch.setattr(attempts, "MAX_BATCH", 10)
    log = AttemptLog(database)
    await rename(database, "delivery_attempts", "hidden")
    with capture_logs() as lines:
        for number in range(75):
            log.add(attempt(f"row-{number}"))
        await log.close()
    overflows = [line for line in lines if line["event"] == "attempt_log_overflow"]
    assert sum(line["dropped"] for line in overflows) == 30

    await rename(database, "hidden", "delivery_attempts")
    await log.close()

    assert await written(database) == [f"row-{number}" for number in range(30, 75)]


async def test_a_row_the_database_never_takes_holds_up_nobody(database: Database) -> None:
    """The refused attempt is dropped and named; its neighbours are written."""
    async with database.transaction() as session:
        await session.execute(
            text(
                "CREATE TRIGGER refuse BEFORE INSERT ON delivery_attempts WHEN NEW.job_name = 'bad' "
                "BEGIN SELECT RAISE(FAIL, 'not this one'); END"
            )
        )
    log = AttemptLog(database)
    with capture_logs() as lines:
        for delivery_id, name in (("first", "good"), ("second", "bad"), ("third", "good")):
            log.add(attempt(delivery_id, job_name=name))
        await log.close()

    assert await written(database) == ["first", "third"]
    assert [(line["event"], line["delivery_id"]) for line in lines] == [("attempt_log_refused", "second")]
    async with database.read() as session:
        assert (await session.execute(select(func.count()).select_from(DeliveryAttempt))).scalar_one() == 2
