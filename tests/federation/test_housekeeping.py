"""Housekeeping: what is purged, and what stays; on SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from db import AttemptOutcome, Database, DeliveryAttempt, DeliveryJob
from federation import housekeeping as module
from federation.housekeeping import Housekeeping

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


def settled(name: str, age: timedelta | None) -> DeliveryJob:
    at = None if age is None else NOW - age
    return DeliveryJob(
        id=name, target_url="t", payload="p", created_at=NOW - timedelta(days=400), settled_at=at, outcome="permanent"
    )


def attempt(name: str, age: timedelta) -> DeliveryAttempt:
    return DeliveryAttempt(
        delivery_id=name,
        job_name="deliver-post",
        server_url="https://b.example",
        attempt=1,
        started_at=NOW - age,
        duration_ms=1,
        outcome=AttemptOutcome.DELIVERED,
    )


async def left(database: Database) -> set[str]:
    async with database.read() as session:
        rows = set((await session.execute(select(DeliveryJob.id))).scalars())  # type: ignore[call-overload] # SQLModel
        return rows | set((await session.execute(select(DeliveryAttempt.delivery_id))).scalars())  # type: ignore[call-overload] # SQLModel


async def test_settled_rows_go_after_seven_days_and_attempts_after_thirty(database: Database) -> None:
    """What is younger stays, and an open row stays for ever."""
    week, month = timedelta(days=7), timedelta(days=30)
    async with database.transaction() as session:
        session.add_all([settled("open", None), settled("fresh", week - HOUR), settled("old", week + HOUR)])
        session.add_all([attempt("recent", month - HOUR), attempt("ancient", month + HOUR)])
    purge = Housekeeping(database).purge
    assert await purge() == 2
    assert await left(database) == {"open", "fresh", "recent"}
    assert await purge() == 0


async def test_a_purge_goes_on_until_nothing_is_left(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, each a transaction of its own; a number that fills the last batch ends too."""
    monkeypatch.setattr(module, "BATCH", 3)
    async with database.transaction() as session:
        session.add_all([settled(f"row-{number}", timedelta(days=8)) for number in range(7)])
        session.add_all([attempt(f"attempt-{number}", timedelta(days=31)) for number in range(6)])
    assert await Housekeeping(database).purge() == 13
    assert await left(database) == set()


async def test_a_database_that_fails_is_logged_and_tried_next_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The loop it runs in is not ended by it."""
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('empty')}/no-tables.db")
    try:
        with capture_logs() as logs:
            assert await Housekeeping(database).purge() == 0
    finally:
        await database.close()
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("purge_failed", "warning")]


async def test_starting_twice_and_stopping_twice_is_harmless(database: Database) -> None:
    """One purge is planned, within the hour."""
    keeper = Housekeeping(database)
    keeper.start()
    keeper.start()
    (job,) = keeper._scheduler.get_jobs()
    assert timedelta(0) < job.next_run_time - NOW < timedelta(minutes=10)
    keeper.stop()
    keeper.stop()
