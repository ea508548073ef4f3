"""Whether the database takes writes: what is noticed of one that does not, and what a healthy one notices."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url
from structlog.testing import capture_logs

from db import Database
from federation.monitoring.readiness import NotReady, Readiness, WriteTrials
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings, alter
from tests.patience import PATIENCE_SECONDS, eventually, until

OFTEN = timedelta(milliseconds=5)
PATIENT = timedelta(seconds=PATIENCE_SECONDS)
ONCE = timedelta(hours=1)

MakeTrials = Callable[..., WriteTrials]


@pytest.fixture
async def make_trials() -> AsyncIterator[MakeTrials]:
    """Trials of the database at a URL; both are closed at the end."""
    made: list[tuple[WriteTrials, Database]] = []

    def make(url: str, *, interval: timedelta = OFTEN, patience: timedelta = PATIENT) -> WriteTrials:
        database = Database(url)
        made.append((WriteTrials(database, interval=interval, patience=patience), database))
        return made[-1][0]

    yield make
    for trials, database in made:
        await trials.close()
        await database.close()


@pytest.fixture
def other(database_file: Path) -> Iterator[sqlite3.Connection]:
    """Another process at the file, which does not wait for a lock."""
    with closing(sqlite3.connect(database_file, timeout=0, isolation_level=None)) as connection:
        yield connection


async def problem(trials: WriteTrials) -> str | None:
    """What the check says of the database now."""
    try:
        await trials()
    except NotReady as error:
        return str(error).removeprefix("the database takes no writes: ")
    return None


async def becomes(trials: WriteTrials, wanted: str | None) -> None:
    await eventually(lambda: problem(trials), lambda found: found == wanted)


async def test_a_file_that_another_process_keeps_locked_takes_no_writes(
    make_trials: MakeTrials, other: sqlite3.Connection, database_file: Path
) -> None:
    """From the bound on until the lock is gone, and again."""
    trials = make_trials(f"sqlite:///{database_file}", patience=timedelta(milliseconds=50))
    for _ in range(2):
        other.execute("BEGIN IMMEDIATE")
        await becomes(trials, "one was not done within 0.05 s")
        other.execute("ROLLBACK")
        await becomes(trials, None)


async def test_nothing_is_ready_before_the_first_write_is_done(
    make_trials: MakeTrials, other: sqlite3.Connection, database_file: Path
) -> None:
    """Nobody knows yet: that is no yes."""
    trials = make_trials(f"sqlite:///{database_file}")
    readiness = Readiness({"writes": trials}, timeout=timedelta(milliseconds=50), reuse=timedelta(0))
    other.execute("BEGIN IMMEDIATE")
    with capture_logs() as logs:
        assert not (await readiness()).ready
        other.execute("ROLLBACK")
        await eventually(readiness, lambda verdict: verdict.ready)
    await readiness.close()
    assert [line["event"] for line in logs] == ["not_ready", "ready_again"]
    assert logs[0]["writes"] == "did not answer in time"


async def test_a_node_whose_database_is_locked_is_not_ready(
    make_settings: MakeSettings, other: sqlite3.Connection, database_file: Path
) -> None:
    """Though the database answers queries."""
    federation = Federation(make_settings())
    other.execute("BEGIN IMMEDIATE")
    with capture_logs():
        verdict = await federation.serving_readiness()
    other.execute("ROLLBACK")
    await federation.close()
    assert (verdict.ready, verdict.checks["database"], verdict.checks["writes"]) == (False, True, False)


async def test_a_read_only_server_takes_no_writes(make_trials: MakeTrials, migrated_postgres_url: str) -> None:
    """As a standby, or one that was made so; until it is another."""
    name = make_url(migrated_postgres_url).database
    await asyncio.to_thread(
        alter, migrated_postgres_url, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'
    )
    trials = make_trials(migrated_postgres_url)
    assert await problem(trials) == "it is read-only, or a standby"
    await asyncio.to_thread(
        alter,
        migrated_postgres_url,
        "SET transaction_read_only = off",
        f'ALTER DATABASE "{name}" RESET default_transaction_read_only',
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    await becomes(trials, None)


async def test_a_user_who_may_only_read_writes_nothing(make_trials: MakeTrials, migrated_postgres_url: str) -> None:
    """Until somebody grants it."""
    url = make_url(migrated_postgres_url)
    name = f"reader_{url.database}"
    reads = (f"CREATE ROLE {name} LOGIN", f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
    await asyncio.to_thread(alter, migrated_postgres_url, *reads)
    trials = make_trials(url.set(username=name, password=None).render_as_string(hide_password=False))
    assert await problem(trials) == "its user has not the right"
    await asyncio.to_thread(alter, migrated_postgres_url, f"GRANT DELETE ON server_links TO {name}")
    await becomes(trials, None)
    await trials.close()
    await asyncio.to_thread(alter, migrated_postgres_url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


async def test_a_table_that_somebody_locks_takes_no_writes(make_trials: MakeTrials, migrated_postgres_url: str) -> None:
    """No connection is kept waiting for it."""
    trials = make_trials(migrated_postgres_url, patience=timedelta(milliseconds=50))
    waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'server_links'::regclass AND NOT granted"
    with psycopg.connect(migrated_postgres_url.replace("+psycopg", "")) as other:
        other.execute("LOCK TABLE server_links IN ACCESS EXCLUSIVE MODE")
        await becomes(trials, "one was not done within 0.05 s")
        await trials.close()
        await until(lambda: other.execute(waiting).fetchone() == (0,))
        other.rollback()
    again = make_trials(migrated_postgres_url)
    assert await problem(again) is None


FULL = """
import asyncio, os, resource, sys
from datetime import timedelta
from db import Database
from federation.monitoring.readiness import NotReady
from federation.monitoring.readiness import WriteTrials

async def told(trials, wanted):
    while True:
        try:
            await trials()
            found = "ready"
        except NotReady as error:
            found = str(error)
        if wanted in found:
            return print(found, flush=True)
        await asyncio.sleep(0.01)

def allow(size):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

async def main():
    database = Database(f"sqlite:///{sys.argv[1]}")
    trials = WriteTrials(database, interval=timedelta(milliseconds=5))
    await told(trials, "ready")
    allow(os.path.getsize(sys.argv[1] + "-wal"))
    await told(trials, "full")
    allow(resource.RLIM_INFINITY)
    await told(trials, "ready")
    await trials.close()
    await database.close()

asyncio.run(main())
"""


async def test_a_full_disk_takes_no_writes(database_file: Path) -> None:
    """Played by the largest size that a file may have; what finds no row would need no room."""
    command = [sys.executable, "-c", FULL, str(database_file)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert done.stderr == ""
    full = "its file cannot be read or written, as on a full or failing disk"
    assert done.stdout.splitlines() == ["ready", f"the database takes no writes: {full}", "ready"]


async def test_a_healthy_file_is_as_it_was(
    make_trials: MakeTrials, other: sqlite3.Connection, database_file: Path
) -> None:
    """One write for all who ask, no row and no number of the header is another, and no lock is kept."""
    other.execute("PRAGMA user_version = 7")
    before, writes = [*other.iterdump()], other.execute("PRAGMA data_version").fetchone()[0]
    trials = make_trials(f"sqlite:///{database_file}", interval=ONCE)
    await asyncio.gather(*(trials() for _ in range(1_000)))
    await trials()
    other.execute("BEGIN IMMEDIATE")
    other.execute("ROLLBACK")
    assert other.execute("PRAGMA data_version").fetchone()[0] - writes == 1
    assert [*other.iterdump()] == before
    assert other.execute("PRAGMA user_version").fetchone() == (7,)


async def test_a_healthy_server_keeps_no_lock(make_trials: MakeTrials, migrated_postgres_url: str) -> None:
    """A transaction was committed, and whoever wants the table for himself gets it at once."""
    newest = "SELECT txid_snapshot_xmax(txid_current_snapshot())"
    with psycopg.connect(migrated_postgres_url.replace("+psycopg", ""), autocommit=True) as other:
        before = other.execute(newest).fetchone()
        assert before is not None
        assert await problem(make_trials(migrated_postgres_url, interval=ONCE)) is None
        after = other.execute(newest).fetchone()
        assert after is not None
        assert after > before
        with other.transaction():
            other.execute("LOCK TABLE server_links IN ACCESS EXCLUSIVE MODE NOWAIT")


async def test_writes_are_tried_whether_or_not_anybody_asks(
    make_trials: MakeTrials, other: sqlite3.Connection, database_file: Path
) -> None:
    """From the first question on, until the end; before it there is none."""

    def writes() -> int:
        return int(other.execute("PRAGMA data_version").fetchone()[0])

    trials, before = make_trials(f"sqlite:///{database_file}"), writes()
    await trials.close()
    assert writes() == before
    await trials()
    await until(lambda: writes() > before + 3)
    await trials.close()
    await trials.close()


async def test_what_nobody_thought_of_is_no_yes(make_trials: MakeTrials, database_file: Path) -> None:
    """By its type alone; the next trial may be better."""
    database = Database(f"sqlite:///{database_file}")
    await database.close()
    trials = WriteTrials(database, interval=OFTEN)
    assert await problem(trials) == "RuntimeError"
    await trials.close()
