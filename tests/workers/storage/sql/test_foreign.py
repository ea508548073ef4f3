"""Tables that somebody else made, changed or damaged, in the place of the storage's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from tests.workers.running import AT_ONCE, Recorder, done, outcome, running
from workers.errors import StorageError
from workers.jobs import JobState
from workers.storage.sql import SqlStorage
from workers.testing.steps import claim, enqueue, failed, job, retried, status
from workers.worker import Worker
from workers.worker.events import WorkerEventKind

PATIENCE = 10.0


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """Somebody else's hand."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


def change(engine: Engine, *statements: str) -> None:
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[SqlStorage]:
    storage = SqlStorage(url)
    await storage.connect()
    try:
        yield storage
    finally:
        await storage.disconnect()


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE workers_jobs (colour TEXT)",
        "CREATE TABLE workers_schema (colour TEXT)",
        "CREATE TABLE workers_schema (version TEXT)",
    ],
    ids=["jobs", "schema", "version"],
)
async def test_tables_of_others_are_left_alone(statement: str, url: str, engine: Engine) -> None:
    """Tables that only share our names are neither used nor changed; the error says whose they are."""
    change(engine, statement)
    if "version" in statement:
        change(engine, "INSERT INTO workers_schema VALUES ('theirs')")
    with pytest.raises(StorageError, match="somebody else"):
        await SqlStorage(url).migrate()
    with pytest.raises(StorageError):
        await SqlStorage(url).connect()
    with engine.connect() as connection:
        table = statement.split()[2]
        assert len(connection.execute(text(f"SELECT * FROM {table}")).keys()) == 1


async def test_a_newer_schema_is_left_alone(url: str, engine: Engine) -> None:
    """A version this package does not know is an error that names it, at `migrate` and at `connect`."""
    await SqlStorage(url).migrate()
    change(engine, "UPDATE workers_schema SET version = 99")
    for call in (SqlStorage(url).migrate, SqlStorage(url).connect):
        with pytest.raises(StorageError, match="version 99"):
            await call()


@pytest.mark.parametrize(
    "statement",
    ["ALTER TABLE workers_jobs RENAME COLUMN backoff TO theirs", "DROP TABLE workers_payloads"],
    ids=["column", "table"],
)
async def test_a_missing_part_is_an_error_at_the_call(statement: str, url: str, engine: Engine) -> None:
    """Verbs that need the column or table say so, at once, and insert nothing."""
    await SqlStorage(url).migrate()
    change(engine, statement)
    async with connected(url) as storage, asyncio.timeout(PATIENCE):
        with pytest.raises(StorageError, match="expected"):
            await storage.enqueue([job()])
        assert (await storage.counts())[JobState.QUEUED] == 0


async def test_migrating_brings_dropped_functions_back(postgres_url: str) -> None:
    """Without its functions PostgreSQL refuses the step and says what to do, which helps; the jobs are kept."""
    await SqlStorage(postgres_url).migrate()
    engine = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    async with connected(postgres_url) as storage:
        await enqueue(storage, job("kept"))
        change(engine, "DROP FUNCTION workers_claim")
        with pytest.raises(StorageError, match="migrate"):
            await claim(storage)
        await storage.migrate()
        assert [held.job_id for held in await claim(storage)] == ["kept"]
    engine.dispose()


async def test_a_directory_is_no_database(tmp_path: Path) -> None:
    """Repeating the call would not help, so it is no outage."""
    for call in (SqlStorage(f"sqlite:///{tmp_path}").migrate, SqlStorage(f"sqlite:///{tmp_path}").connect):
        with pytest.raises(StorageError, match="is a directory"):
            await call()


@pytest.mark.parametrize("keep", [0.3, 0.7])
async def test_a_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    """A file that lost its end is called damaged, before anything is claimed from it."""
    file = tmp_path / "jobs.db"
    await SqlStorage(f"sqlite:///{file}").migrate()
    async with connected(f"sqlite:///{file}") as storage:
        await enqueue(storage, *(job(payload=bytes(500)) for _ in range(500)))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(StorageError, match="damaged"):
        async with connected(f"sqlite:///{file}") as storage, asyncio.timeout(PATIENCE):
            await claim(storage, 1_000)


async def test_a_worker_sets_damaged_jobs_aside(url: str, engine: Engine) -> None:
    """A job whose payload is gone fails with that reason; unreadable policies and errors stop neither it nor others."""
    await SqlStorage(url).migrate()
    recorder = Recorder()
    async with connected(url) as storage:
        names = ("bare", "junk", "tried", "good")
        await enqueue(storage, *(job(name) for name in names))
        claims = {held.job_id: held for held in await claim(storage, 4)}
        await storage.settle([retried(held) if name != "tried" else failed(held) for name, held in claims.items()])
        change(
            engine,
            "DELETE FROM workers_payloads WHERE seq = (SELECT seq FROM workers_jobs WHERE id = 'bare')",
            "UPDATE workers_jobs SET backoff = '[[', error = '{}', created_at = 9000000000000000000 WHERE id = 'junk'",
            "UPDATE workers_jobs SET error = 'no JSON' WHERE id = 'tried'",
        )
        assert (await status(storage, "junk")).state is JobState.QUEUED
        tried = (await status(storage, "tried")).last_error
        assert tried is not None
        assert tried.type == "CorruptRecord"
        worker = Worker(storage, {"*": done}, retry=AT_ONCE, observers=[recorder], poll_interval=timedelta(hours=1))
        async with running(worker):
            bare = await outcome(storage, "bare")
            for name in ("junk", "good"):
                assert (await outcome(storage, name)).kind.value == "completed"
    assert bare.error is not None
    assert "payload is missing" in bare.error.message
    assert recorder.of(WorkerEventKind.ERROR) == []
