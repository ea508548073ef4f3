"""What `SqlStorage` promises on either database: other processes, tables of any age, and what its steps cost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from tests.workers.storage.sql.steps import MINUTE, carried_out, change, child, claim_all, connected, go, ids
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import StorageError
from workers.jobs import Completed, Continued, Failed, JobEventKind, JobState, ProgressReport, SettleStatus
from workers.storage.sql import SqlStorage
from workers.storage.sql import schema as sql_schema
from workers.storage.sql.postgres import steps as postgres_steps
from workers.storage.sql.sqlite import settle as sqlite_settle
from workers.testing.steps import ERROR, PATIENCE, claim, job, state

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


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6, 7, 8])
async def test_older_tables_are_brought_forward(url: str, outsider: Engine, database: str, version: int) -> None:
    """Jobs from before there was progress, chains, keys, dependents, failures, gates or results in events stay.

    They can have all then.
    """
    async with connected(SqlStorage(url)) as storage:
        await storage.enqueue([job("a")])
    age = {"sqlite": take_back_on_sqlite, "postgres": take_back_on_postgres}[database]
    age(outsider, version)
    with pytest.raises(StorageError, match="migrate"):
        await SqlStorage(url).connect()
    await SqlStorage(url).migrate()
    async with connected(SqlStorage(url)) as storage:
        [claimed] = await claim_all(storage)
        await storage.progress([ProgressReport(claim=claimed, value=b"1")])
        assert [status and status.encoded_progress for status in await storage.status(["a"])] == [b"1"]
        await storage.settle([Continued(claim=claimed, then=job("a", chain_index=1))])
        assert [claimed.chain_index for claimed in await claim_all(storage)] == [1]
        keys = (Deduplication(key="k"), Deduplication(key="t", mode=DeduplicationMode.THROTTLE, ttl=MINUTE))
        for again in (False, True):
            answers = await storage.enqueue([job(f"{key.key}-{again}", deduplication=key) for key in keys])
            assert [answer.id for answer in answers] == ["k-False", "t-False"]
        await storage.enqueue([replace(job("b"), after=("a",))])
        await storage.remove(["a"], running=True)
        assert await storage.result("b") is not None
        await storage.enqueue([job("c")])
        await storage.settle([Failed(claim=claimed, error=ERROR) for claimed in await claim_all(storage)])
        [found] = await storage.read(["c"])
        assert found is not None
        assert [one.error_type for one in found.failures] == [ERROR.type]


_TABLES_OF_7 = ("workers_limits", "workers_gates", "workers_crons")


def take_back_on_sqlite(outsider: Engine, version: int) -> None:
    """The tables are as that version made them."""
    change(outsider, "DROP TRIGGER workers_jobs_follower_gone", "DROP TABLE workers_outcomes")
    if version < 8:
        change(outsider, "ALTER TABLE workers_events DROP COLUMN result")
    if version < 7:
        change(outsider, *(f"DROP TABLE {table}" for table in _TABLES_OF_7))
    if version < 5:
        for name in ("ended", "gone", "waited", "waited_gone"):
            change(outsider, f"DROP TRIGGER workers_jobs_{name}")
        change(outsider, "DROP TABLE workers_dependencies", "DROP INDEX workers_jobs_waiting")
    if version < 4:
        change(outsider, "DROP TABLE workers_marks", "DROP INDEX workers_jobs_by_deduplication_key")
    lacking = (
        "follows",
        "failures",
        "dependents",
        "deduplication_key",
        "deduplication_mode",
        "chain_index",
        "progress",
    )
    gone = lacking[: (1, 1, 1, 2, 3, 5, 6, 7)[8 - version]]
    change(
        outsider,
        *(f"ALTER TABLE workers_jobs DROP COLUMN {column}" for column in gone),
        f"UPDATE workers_schema SET version = {version}",
    )


# With other columns than now, so that it cannot be replaced.
_CANDIDATES_OF_OLD = (
    "DROP FUNCTION workers_candidates",
    "CREATE FUNCTION workers_candidates(p_queue integer, p_names text[], p_any boolean, p_limit integer)"
    " RETURNS TABLE (seq bigint, ordering_key text) LANGUAGE sql AS 'SELECT 1, NULL'",
)


def take_back_on_postgres(outsider: Engine, version: int) -> None:
    """The tables and functions are as that version made them."""
    _without(outsider, "error text", "j.error")
    change(
        outsider,
        "DROP TABLE workers_told, workers_outcomes",
        "DROP TRIGGER workers_jobs_follower_gone ON workers_jobs",
        "DROP FUNCTION workers_follower_gone",
        "ALTER TABLE workers_jobs DROP COLUMN follows",
    )
    if version < 7:
        change(outsider, *(f"DROP TABLE {table}" for table in _TABLES_OF_7), *_CANDIDATES_OF_OLD)
    if version < 6:
        change(outsider, "ALTER TABLE workers_jobs DROP COLUMN failures")
    change(outsider, f"UPDATE workers_schema SET version = {version}")
    if version < 5:
        for name in ("ended", "gone", "waited", "waited_gone"):
            change(outsider, f"DROP TRIGGER workers_jobs_{name} ON workers_jobs")
        change(
            outsider,
            "DROP TABLE workers_dependencies",
            "DROP INDEX workers_jobs_waiting",
            "DROP FUNCTION workers_release, workers_ended, workers_waited",
            "ALTER TABLE workers_jobs DROP COLUMN dependents",
        )
    if version < 4:
        change(
            outsider,
            "DROP TABLE workers_marks",
            "DROP FUNCTION workers_marked, workers_take_keys",
            "ALTER TABLE workers_jobs DROP COLUMN deduplication_key, DROP COLUMN deduplication_mode",
        )
    if version < 3:
        _without(outsider, "chain_index integer", "j.chain_index")
        change(outsider, "ALTER TABLE workers_jobs DROP COLUMN chain_index")
    if version < 2:
        change(outsider, "ALTER TABLE workers_jobs DROP COLUMN progress", "DROP FUNCTION workers_progress")


def _without(outsider: Engine, column: str, value: str) -> None:
    """Take a column from what a claim answers, as in versions that did not know it."""
    with outsider.connect() as connection:
        made: str = connection.exec_driver_sql("SELECT pg_get_functiondef('workers_claim'::regproc)").scalar_one()
        connection.exec_driver_sql("DROP FUNCTION workers_claim")
        connection.exec_driver_sql(made.replace(f" {column},", "").replace(f" {value},", ""))


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
