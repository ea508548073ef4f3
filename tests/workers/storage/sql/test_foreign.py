"""Tables that somebody else made, changed or damaged, in the place of the storage's own."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from tests.workers.running import AT_ONCE, Recorder, done, outcome, running
from tests.workers.storage.sql.steps import change, connected, on_postgres
from workers import WorkerOptions
from workers.errors import StorageError
from workers.jobs import JobState
from workers.storage.sql import SqlStorage
from workers.storage.sql.schema import VERSION
from workers.testing.steps import PATIENCE, claim, enqueue, failed, job, retried, status
from workers.worker import Worker
from workers.worker.events import WorkerEventKind


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE workers_jobs (colour TEXT)",
        "CREATE TABLE workers_schema (colour TEXT)",
        "CREATE TABLE workers_schema (version TEXT)",
    ],
    ids=["jobs", "schema", "version"],
)
async def test_tables_of_others_are_left_alone(statement: str, empty_url: str, outsider: Engine) -> None:
    """Tables that only share our names are neither used nor changed; the error says whose they are."""
    change(outsider, statement)
    if "version" in statement:
        change(outsider, "INSERT INTO workers_schema VALUES ('theirs')")
    with pytest.raises(StorageError, match="somebody else"):
        await SqlStorage(empty_url).migrate()
    with pytest.raises(StorageError):
        await SqlStorage(empty_url).connect()
    with outsider.connect() as connection:
        table = statement.split()[2]
        assert len(connection.execute(text(f"SELECT * FROM {table}")).keys()) == 1


@pytest.mark.parametrize(
    ("version", "todo"), [(VERSION - 1, "then drop them or use another database"), (VERSION + 1, "upgrade it")]
)
async def test_tables_of_another_version_are_left_alone(version: int, todo: str, url: str, outsider: Engine) -> None:
    """The error names it and says what to do, at `migrate` and at `connect`; their jobs are kept."""
    async with connected(SqlStorage(url)) as storage:
        await enqueue(storage, job("theirs"))
    change(outsider, f"UPDATE workers_schema SET version = {version}")
    for call in (SqlStorage(url).migrate, SqlStorage(url).connect):
        with pytest.raises(StorageError, match=f"have version {version}, .*{todo}"):
            await call()
    with outsider.connect() as connection:
        kept = connection.execute(text("SELECT version, id FROM workers_schema, workers_jobs")).all()
    assert [tuple(row) for row in kept] == [(version, "theirs")]


@pytest.mark.parametrize(
    "statement",
    ["ALTER TABLE workers_jobs RENAME COLUMN backoff TO theirs", "DROP TABLE workers_payloads"],
    ids=["column", "table"],
)
async def test_a_missing_part_is_an_error_at_the_call(statement: str, url: str, outsider: Engine) -> None:
    """Verbs that need the column or table say so, at once, and insert nothing, where it vanished while we work."""
    async with connected(SqlStorage(url)) as storage, asyncio.timeout(PATIENCE):
        change(outsider, statement)
        with pytest.raises(StorageError, match="expected"):
            await storage.enqueue([job()])
        assert (await storage.counts())[JobState.QUEUED] == 0


@on_postgres
async def test_migrating_brings_dropped_functions_back(storage: SqlStorage, outsider: Engine) -> None:
    """Without its functions PostgreSQL refuses the step and says what to do, which helps; the jobs are kept."""
    await enqueue(storage, job("kept"))
    change(outsider, "DROP FUNCTION workers_claim")
    with pytest.raises(StorageError, match="migrate"):
        await claim(storage)
    await storage.migrate()
    assert [held.job_id for held in await claim(storage)] == ["kept"]


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
    async with connected(SqlStorage(f"sqlite:///{file}")) as storage:
        await enqueue(storage, *(job(payload=bytes(500)) for _ in range(500)))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(StorageError, match="damaged"):
        async with connected(SqlStorage(f"sqlite:///{file}")) as storage, asyncio.timeout(PATIENCE):
            await claim(storage, 1_000)


async def test_a_worker_sets_damaged_jobs_aside(url: str, outsider: Engine) -> None:
    """A job whose payload is gone fails with that reason; unreadable policies and errors stop neither it nor others."""
    recorder = Recorder()
    async with connected(SqlStorage(url)) as storage:
        names = ("bare", "junk", "tried", "good")
        await enqueue(storage, *(job(name) for name in names))
        claims = {held.job_id: held for held in await claim(storage, 4)}
        await storage.settle([retried(held) if name != "tried" else failed(held) for name, held in claims.items()])
        change(
            outsider,
            "DELETE FROM workers_payloads WHERE seq = (SELECT seq FROM workers_jobs WHERE id = 'bare')",
            "UPDATE workers_jobs SET backoff = '[[', error = '{}', created_at = 9000000000000000000 WHERE id = 'junk'",
            "UPDATE workers_jobs SET error = 'no JSON' WHERE id = 'tried'",
        )
        assert (await status(storage, "junk")).state is JobState.QUEUED
        tried = (await status(storage, "tried")).last_error
        assert tried is not None
        assert tried.type == "CorruptRecord"
        worker = Worker(
            storage,
            {"*": done},
            observers=[recorder],
            options=WorkerOptions(retry=AT_ONCE, poll_interval=timedelta(hours=1)),
        )
        async with running(worker):
            bare = await outcome(storage, "bare")
            for name in ("junk", "good"):
                assert (await outcome(storage, name)).kind.value == "completed"
    assert bare.error is not None
    assert "payload is missing" in bare.error.message
    assert recorder.of(WorkerEventKind.ERROR) == []
