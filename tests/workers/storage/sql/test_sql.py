"""What `SqlStorage` promises on either database: other processes, tables, and what its steps cost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from tests.workers.storage.sql.steps import carried_out, change, child, claim_all, connected, go, ids
from workers.errors import StorageError
from workers.jobs import Completed, JobEventKind, JobState, SettleStatus
from workers.storage.sql import SqlStorage
from workers.storage.sql import schema as sql_schema
from workers.storage.sql.postgres import steps as postgres_steps
from workers.storage.sql.sqlite import settle as sqlite_settle
from workers.testing.steps import PATIENCE, claim, enqueue, job, state

# Other processes


async def test_two_processes_share_no_job(storage: SqlStorage, url: str, database: str) -> None:
    """Claims racing from two processes get every job exactly once."""
    await storage.enqueue([job(str(number)) for number in range(1_000)])
    mine: list[str] = []
    async with child("race", url) as process:
        go(process)
        assert process.stdout is not None
        first = await process.stdout.readline()
        while claims := await claim(storage, 7):
            mine += [claimed.job_id for claimed in claims]
        output, _ = await process.communicate()
    theirs = (first + output).decode().split()
    left = await ids(storage)  # what each passed over because the other was just looking at it
    assert mine
    assert not left or database == "postgres"
    assert sorted(mine + theirs + left) == sorted(str(number) for number in range(1_000))


async def test_another_processs_completion_is_told_to_a_subscriber(storage: SqlStorage, url: str) -> None:
    """A waiter for a job's end hears of it although another process ran the job, and finds the result."""
    async with child("complete", url) as process, storage.subscribe("a") as events:
        await storage.enqueue([job("a"), job("b")])
        go(process)
        kinds = [(await asyncio.wait_for(events.get(), PATIENCE)).kind for _ in range(3)]
    assert kinds == [JobEventKind.QUEUED, JobEventKind.ACTIVE, JobEventKind.COMPLETED]
    outcome = await storage.result("a")
    assert outcome is not None
    assert outcome.result == b"from the child"


# Tables


async def test_missing_tables_say_what_to_do(empty_url: str, outsider: Engine) -> None:
    """A database nobody migrated is not connected to."""
    outsider.connect().close()  # which makes SQLite's file
    with pytest.raises(StorageError, match="migrate"):
        await SqlStorage(empty_url).connect()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ("DROP TABLE workers_payloads", "workers_payloads"),
        ("ALTER TABLE workers_jobs DROP COLUMN stalls", "workers_jobs.stalls"),
    ],
)
async def test_tables_that_are_not_whole_are_named(url: str, outsider: Engine, damage: str, name: str) -> None:
    """Their version alone says nothing."""
    async with connected(SqlStorage(url)):
        pass
    with outsider.begin() as connection:
        connection.execute(text(damage))
    with pytest.raises(StorageError, match=f"lack {name};.*backup"):
        await SqlStorage(url).connect()


async def test_anybody_may_migrate_at_once(empty_url: str, outsider: Engine) -> None:
    """Processes and threads that start together all find the tables made, once, and jobs in them stay."""
    async with child("migrate", empty_url) as one, child("migrate", empty_url) as other:
        go(one)
        go(other)
        await asyncio.gather(*(SqlStorage(empty_url).migrate() for _ in range(3)))
        assert (await one.wait(), await other.wait()) == (0, 0)
    async with connected(SqlStorage(empty_url)) as storage:
        await storage.enqueue([job("a")])
        await storage.migrate()
        assert await ids(storage) == ["a"]
    with outsider.connect() as connection:
        assert connection.execute(text("SELECT version FROM workers_schema")).all() == [(sql_schema.VERSION,)]


async def test_what_somebody_elses_statement_ends_strands_nobody(storage: SqlStorage, outsider: Engine) -> None:
    """Dependents are released by a trigger, at once or, on SQLite, with the next sweep."""
    await enqueue(storage, job("done"), job("bad"), job("gone"), job("kept"))
    await enqueue(storage, *(replace(job(f"after-{name}"), after=(name,)) for name in ("done", "bad", "gone", "kept")))
    ends = "finished_at = created_at, expires_at = created_at + 3600000 WHERE id ="
    with outsider.begin() as connection:
        connection.execute(text(f"UPDATE workers_jobs SET state = 'completed', {ends} 'done'"))
        connection.execute(text(f"UPDATE workers_jobs SET state = 'failed', {ends} 'bad'"))
        connection.execute(text("DELETE FROM workers_jobs WHERE id = 'gone'"))
    await storage.sweep(10)
    found = await storage.status([f"after-{name}" for name in ("done", "bad", "gone", "kept")])
    assert [one and one.state for one in found] == [
        JobState.QUEUED,
        JobState.FAILED,
        JobState.FAILED,
        JobState.WAITING,
    ]


# Steps


async def test_a_job_that_moves_is_counted_once(storage: SqlStorage, outsider: Engine) -> None:
    """Counting sees a job in one state, though another process releases it meanwhile."""
    await storage.enqueue([job("a")])
    await claim_all(storage)
    released: list[str] = []

    def release(statement: str) -> None:
        if "count(*)" in statement:
            change(outsider, "UPDATE workers_jobs SET state = 'ready', token = NULL, worker = NULL, lease_until = NULL")
            released.append(statement)

    with carried_out(release):
        assert sum((await storage.counts()).values()) == 1
    assert released
    assert (await storage.counts())[JobState.QUEUED] == 1


async def test_a_busy_key_holds_up_nobody_else(storage: SqlStorage) -> None:
    """A thousand jobs of one running key are stepped over, and come in order when it is free."""
    await storage.enqueue([job(f"k{number:04}", ordering_key="k") for number in range(1_000)])
    await storage.enqueue([job("other")])
    first = await claim(storage, 50)
    while "other" not in (found := [claimed.job_id for claimed in first]):
        first += await claim(storage, 50)
    assert sorted(found) == ["k0000", "other"]
    assert (await storage.counts())[JobState.QUEUED] == 999
    await storage.settle([Completed(claim=claimed, result=b"") for claimed in first])
    assert await ids(storage) == ["k0001"]


async def test_an_oversized_result_fails_alone(storage: SqlStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result the database cannot hold is an error of that element; its neighbour is settled."""
    for module in (sqlite_settle, postgres_steps):
        monkeypatch.setattr(module, "MAX_RESULT_BYTES", 10)
    await storage.enqueue([job("a"), job("b")])
    one, other = await claim_all(storage)
    outcomes = await storage.settle([Completed(claim=one, result=bytes(11)), Completed(claim=other, result=b"")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]
    assert await state(storage, "a") is JobState.PROCESSING


@pytest.mark.parametrize(("database", "looks"), [("sqlite", 9), ("postgres", 4)])
async def test_an_idle_wait_asks_next_to_nothing(storage: SqlStorage, looks: int) -> None:
    """While nothing is committed, a sleeping wait reads no table, however long it sleeps.

    On SQLite it looks thrice by three statements: first, after the watcher's first tick, and last.
    """
    statements: list[str] = []

    def count(statement: str) -> None:
        if not statement.startswith("PRAGMA"):
            statements.append(statement)

    await storage.wait(["work"], timeout=timedelta(milliseconds=1))
    with carried_out(count):
        await storage.wait(["work"], timeout=timedelta(milliseconds=800))
    assert 0 < len(statements) <= looks, statements
