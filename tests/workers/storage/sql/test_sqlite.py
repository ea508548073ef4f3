"""What only `SqlStorage` promises: transactions of the caller, other processes, its own tables, flat cost."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, TextClause, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlmodel.ext.asyncio.session import AsyncSession as SqlModelSession

from tests.workers.harnesses import SqliteHarness
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import StorageError, StorageUnavailable, TransactionError, Unsupported
from workers.jobs import (
    DROP,
    CancelResult,
    Claim,
    Completed,
    Continued,
    EnqueueStatus,
    ErrorInfo,
    Failed,
    JobEventKind,
    JobState,
    NewJob,
    ProgressReport,
    Released,
    SettleStatus,
)
from workers.storage.base import Storage
from workers.storage.sql import SqlStorage, decision, endings, recovery
from workers.storage.sql import caller as sql_caller
from workers.storage.sql import keys as sql_marks
from workers.storage.sql import manage as sql_manage
from workers.storage.sql import records as sql_records
from workers.storage.sql import schema as sql_schema
from workers.storage.sql.sqlite import claim as sql_claim
from workers.storage.sql.sqlite import enqueue as sql_enqueue
from workers.storage.sql.sqlite import events as sql_events
from workers.storage.sql.sqlite import lane as sql_sqlite
from workers.storage.sql.sqlite import leases as sql_leases
from workers.storage.sql.sqlite import settle as sql_settle
from workers.testing import Case, all_cases, run

MINUTE = timedelta(minutes=1)
ANY = {"*": MINUTE}
PATIENCE = 10.0


def job(job_id: str, name: str = "work", **options: object) -> NewJob:
    return NewJob(id=job_id, name=name, payload=b"{}", **options)  # type: ignore[arg-type]  # fields as keywords


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A database with the tables."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    await SqlStorage(url).migrate()
    return url


@pytest.fixture
async def storage(url: str) -> AsyncIterator[SqlStorage]:
    async with connected(SqlStorage(url)) as storage:
        yield storage


@asynccontextmanager
async def connected(storage: SqlStorage) -> AsyncIterator[SqlStorage]:
    await storage.connect()
    try:
        yield storage
    finally:
        await storage.disconnect()


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    """The application's own engine."""
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    yield engine
    await engine.dispose()


@pytest.fixture
def sync_engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    yield engine
    engine.dispose()


async def claim(storage: Storage, limit: int = 100) -> list[Claim]:
    return await storage.claim("worker", leases=ANY, limit=limit)


async def ids(storage: Storage) -> list[str]:
    return [claimed.job_id for claimed in await claim(storage)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def child(verb: str, url: str, argument: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has connected and waits for `go`; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.workers.storage.sql.child", verb, url, argument),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), PATIENCE) == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def go(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")


# The caller's transaction


async def test_jobs_of_a_committed_transaction_are_there(storage: SqlStorage, engine: AsyncEngine) -> None:
    """A job enqueued in the caller's transaction is unseen until the commit, and claimable after it."""
    async with AsyncSession(engine) as session:
        [result] = await storage.enqueue([job("a")], connection=session)
        assert result.status is EnqueueStatus.QUEUED
        assert await storage.status(["a"]) == [None]
        await session.commit()
    assert await ids(storage) == ["a"]


async def test_jobs_of_a_rolled_back_transaction_never_were(storage: SqlStorage, engine: AsyncEngine) -> None:
    """A rollback takes the jobs with the caller's other writes, and wakes nobody."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=timedelta(milliseconds=300)))
    started = time.monotonic()
    async with AsyncSession(engine) as session:
        await storage.enqueue([job("a")], connection=session)
        await session.rollback()
    await waiting
    assert time.monotonic() - started >= 0.29
    assert await ids(storage) == []


@pytest.mark.parametrize("kind", ["AsyncSession", "SQLModel", "AsyncConnection"])
async def test_asynchronous_connections_are_accepted(storage: SqlStorage, engine: AsyncEngine, kind: str) -> None:
    """Sessions of SQLAlchemy and SQLModel and bare connections all carry jobs."""
    kinds = {"AsyncSession": AsyncSession, "SQLModel": SqlModelSession, "AsyncConnection": AsyncConnection}
    async with kinds[kind](engine) as connection:
        await storage.enqueue([job("a")], connection=connection)
        await connection.commit()
    assert await ids(storage) == ["a"]


@pytest.mark.parametrize("kind", ["Session", "Connection"])
async def test_synchronous_connections_are_accepted(storage: SqlStorage, sync_engine: Engine, kind: str) -> None:
    """A synchronous session or connection is used where the caller is."""
    with Session(sync_engine) if kind == "Session" else sync_engine.connect() as connection:
        await storage.enqueue([job("a")], connection=connection)
        connection.commit()
    assert await ids(storage) == ["a"]


async def test_the_commit_wakes_waiters_at_once(
    storage: SqlStorage, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter of this process hears of a session's commit from the session, not from the poll, and not before it."""
    monkeypatch.setattr(sql_sqlite, "POLL", timedelta(hours=1))
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    async with AsyncSession(engine) as session, session.begin():
        await storage.enqueue([job("a")], connection=session)
        async with session.begin_nested():
            await session.execute(text("SELECT 1"))
        await storage.status(["a"])
        assert not waiting.done()
    await asyncio.wait_for(waiting, PATIENCE)
    assert await ids(storage) == ["a"]


async def test_a_bare_connections_commit_wakes_waiters(storage: SqlStorage, engine: AsyncEngine) -> None:
    """A connection that tells nobody of its commit is noticed by the watcher."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    async with engine.connect() as connection:
        await storage.enqueue([job("a")], connection=connection)
        await connection.commit()
    await asyncio.wait_for(waiting, PATIENCE)
    assert await ids(storage) == ["a"]


async def test_events_of_the_callers_transaction_follow_its_commit(storage: SqlStorage, engine: AsyncEngine) -> None:
    """Subscribers hear of a job that came in by a caller's transaction, and of none that was rolled back."""
    async with storage.events() as events, AsyncSession(engine) as session:
        await storage.enqueue([job("gone")], connection=session)
        await session.rollback()
        await storage.enqueue([job("there")], connection=session)
        await session.commit()
        heard = await asyncio.wait_for(events.get(), PATIENCE)
    assert (heard.kind, heard.job_id) == (JobEventKind.QUEUED, "there")


async def test_writing_beside_the_own_transaction_is_refused_at_once(storage: SqlStorage, engine: AsyncEngine) -> None:
    """What would wait for the task's own write lock raises instead; reading and other tasks are free to go on."""
    async with AsyncSession(engine) as session:
        await storage.enqueue([job("a")], connection=session)
        with pytest.raises(TransactionError, match="connection="):
            await storage.enqueue([job("b")])
        with pytest.raises(TransactionError):
            await claim(storage)
        assert await storage.status(["a"]) == [None]
        elsewhere = asyncio.create_task(storage.enqueue([job("c")]))
        await storage.enqueue([job("b")], connection=session)
        await session.commit()
        await elsewhere
        await storage.enqueue([job("d")])
    assert sorted(await ids(storage)) == ["a", "b", "c", "d"]


async def test_a_slow_transaction_is_warned_about_once(
    storage: SqlStorage, engine: AsyncEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction left open after its enqueues shows in the log, one line however many jobs it holds."""
    monkeypatch.setattr(sql_caller, "SLOW_TRANSACTION", timedelta(milliseconds=20))
    with caplog.at_level(logging.WARNING, logger="workers"):
        async with AsyncSession(engine) as session:
            await storage.enqueue([job("a")], connection=session)
            await storage.enqueue([job("b")], connection=session)
            await until(lambda: asyncio.sleep(0, bool(caplog.records)))
            await asyncio.sleep(0.05)
            await session.commit()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_connection_of_another_database_is_refused(storage: SqlStorage, tmp_path: Path) -> None:
    """Jobs never go to a database other than the storage's."""
    other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
    async with other.connect() as connection:
        with pytest.raises(StorageError, match="another database"):
            await storage.enqueue([job("a")], connection=connection)
    await other.dispose()
    with pytest.raises(TypeError, match="connection must be"):
        await storage.enqueue([job("a")], connection="nonsense")


async def test_a_stale_transaction_says_what_to_do(storage: SqlStorage, sync_engine: Engine) -> None:
    """A deferred transaction that read before another commit cannot write; the error says so and how to go on."""
    listening = sync_engine.connect()
    listening.exec_driver_sql("BEGIN")
    listening.exec_driver_sql("SELECT count(*) FROM workers_jobs").all()
    await storage.enqueue([job("a")])
    with pytest.raises(StorageUnavailable, match="roll that back"):
        await storage.enqueue([job("b")], connection=listening)
    listening.close()


async def test_the_write_lock_is_taken_before_anything_is_read(
    storage: SqlStorage, sync_engine: Engine, url: str
) -> None:
    """In a transaction that began as a reading one, no other connection can write between our look and our write."""
    other = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)
    refused: list[str] = []

    def write_now(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("SELECT"):
            with pytest.raises(sqlite3.OperationalError):
                other.execute("BEGIN IMMEDIATE")
            refused.append(statement)

    event.listen(sync_engine, "before_cursor_execute", write_now)
    with sync_engine.connect() as connection:
        await storage.enqueue([job("a")], connection=connection)
        connection.commit()
    other.close()
    assert refused


_NEARBY = [case for case in all_cases() if case.verb in ("wait", "events", "cancel")]


@pytest.mark.parametrize("case", _NEARBY, ids=lambda case: case.id)
async def test_one_process_needs_no_poll(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a process the step that changes something tells waiters and subscribers; no watcher has to notice it."""
    monkeypatch.setattr(sql_sqlite, "POLL", timedelta(hours=1))
    async with SqliteHarness(tmp_path / "jobs.db") as harness:
        await harness.migrate()
        await run(case, harness)


# Other processes


async def test_another_process_wakes_a_waiter(storage: SqlStorage, url: str) -> None:
    """A job another process enqueued ends `wait` within about the declared latency."""
    async with child("enqueue", url, argument="a") as process:
        waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
        await storage.status(["a"])
        assert not waiting.done()
        go(process)
        await asyncio.wait_for(waiting, PATIENCE)
    assert await ids(storage) == ["a"]


async def test_another_processs_completion_is_told_to_a_subscriber(storage: SqlStorage, url: str) -> None:
    """A waiter for a job's end hears of it although another process ran the job."""
    async with child("complete", url) as process, storage.subscribe("a") as events:
        await storage.enqueue([job("a"), job("b")])
        go(process)
        kinds = [(await asyncio.wait_for(events.get(), PATIENCE)).kind for _ in range(3)]
    assert kinds == [JobEventKind.QUEUED, JobEventKind.ACTIVE, JobEventKind.COMPLETED]
    outcome = await storage.result("a")
    assert outcome is not None
    assert outcome.result == b"from the child"


async def test_another_processs_cancel_request_is_told(storage: SqlStorage, url: str) -> None:
    """Who listens for cancel requests alone hears of one from another process, and has no other event written down."""
    await storage.enqueue([job("a"), job("b")])
    await claim(storage)
    async with child("cancel", url, argument="a") as process, storage.cancel_requests() as requests:
        go(process)
        heard = await asyncio.wait_for(requests.get(), PATIENCE)
    assert (heard.kind, heard.job_id) == (JobEventKind.CANCEL_REQUESTED, "a")
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        assert database.execute("SELECT kind FROM workers_events").fetchall() == [("cancel_requested",)]
        assert database.execute("SELECT count(*) FROM workers_listeners").fetchone() == (0,)
    database.close()


async def test_an_event_of_a_newer_version_hides_no_cancel_request(storage: SqlStorage, url: str) -> None:
    """What cannot be read is passed over, and what comes after it is read without waiting for another commit."""
    await storage.enqueue([job("a")])
    await claim(storage)
    async with storage.cancel_requests() as requests:
        with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
            database.executemany(
                "INSERT INTO workers_events (queue, process, kind, job_id, at) SELECT id, 'other', ?, 'a', 0"
                " FROM workers_queues",
                [("of tomorrow",), (JobEventKind.CANCEL_REQUESTED.value,)],
            )
        database.close()
        heard = await asyncio.wait_for(requests.get(), PATIENCE)
    assert (heard.kind, heard.job_id) == (JobEventKind.CANCEL_REQUESTED, "a")


async def test_events_are_written_down_for_other_processes_only(storage: SqlStorage, url: str) -> None:
    """With no other process listening, events cost no row."""
    async with storage.events():
        await storage.enqueue([job("a")])
        await claim(storage)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        assert database.execute("SELECT count(*) FROM workers_events").fetchone() == (0,)
        assert database.execute("SELECT count(*) FROM workers_listeners").fetchone() == (1,)
    database.close()


async def test_two_processes_share_no_job(storage: SqlStorage, url: str) -> None:
    """Claims racing from two processes get every job exactly once."""
    await storage.enqueue([job(str(number)) for number in range(1_000)])
    mine: list[str] = []
    async with child("race", url) as process:
        go(process)
        assert process.stdout is not None
        first = await process.stdout.readline()
        while claims := await claim(storage, limit=7):
            mine += [claimed.job_id for claimed in claims]
        output, _ = await process.communicate()
    theirs = (first + output).decode().split()
    assert mine
    assert sorted(mine + theirs) == sorted(str(number) for number in range(1_000))


def test_a_forked_process_opens_its_own(tmp_path: Path) -> None:
    """A fork finds none of its parent's threads: what the parent connected says so at once, a new storage works."""
    code = f"""
import asyncio, os
from workers.errors import StorageError
from workers.storage.sql import SqlStorage

async def child(parents, url):
    try:
        await parents.counts()
    except StorageError as error:
        assert "forked" in str(error), error
    await parents.disconnect()
    mine = SqlStorage(url)
    await mine.connect()
    await mine.counts()
    await mine.disconnect()

async def parent(storage):
    await storage.migrate()
    await storage.connect()

url = "sqlite:///{tmp_path}/jobs.db"
storage = SqlStorage(url)
asyncio.run(parent(storage))
if os.fork() == 0:
    asyncio.run(asyncio.wait_for(child(storage, url), {PATIENCE}))
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
asyncio.run(storage.counts())
asyncio.run(storage.disconnect())
"""
    directory = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=directory, timeout=3 * PATIENCE)


@pytest.mark.parametrize("replace", [True, False], ids=["replaced", "deleted"])
async def test_a_file_taken_away_is_noticed(storage: SqlStorage, tmp_path: Path, replace: bool) -> None:
    """Nothing is acknowledged that went into a file nobody can find, and no empty file is left in its place."""
    await storage.enqueue([job("a")])
    (tmp_path / "jobs.db").rename(tmp_path / "old.db")
    if replace:
        await SqlStorage(f"sqlite:///{tmp_path}/jobs.db").migrate()
    with pytest.raises(StorageError, match="replaced"):
        await storage.enqueue([job("b")])
    assert (tmp_path / "jobs.db").exists() is replace


# Tables


async def test_missing_tables_say_what_to_do(tmp_path: Path) -> None:
    """Neither a missing file nor a foreign database is connected to, and no file appears."""
    missing = tmp_path / "missing.db"
    with pytest.raises(StorageError, match="migrate"):
        await SqlStorage(f"sqlite:///{missing}").connect()
    assert not missing.exists()
    foreign = tmp_path / "foreign.db"
    sqlite3.connect(foreign).close()
    foreign.touch()
    with pytest.raises(StorageError, match="migrate"):
        await SqlStorage(f"sqlite:///{foreign}").connect()
    with pytest.raises(StorageError, match="directory"):
        await SqlStorage(f"sqlite:///{tmp_path}/no/such/jobs.db").migrate()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """Foreign content is a `StorageError`, not something to retry."""
    (tmp_path / "jobs.db").write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(StorageError, match="not an SQLite database"):
        await SqlStorage(f"sqlite:///{tmp_path}/jobs.db").migrate()


async def test_migrating_again_keeps_the_jobs(storage: SqlStorage) -> None:
    """A migration that has nothing to do does nothing."""
    await storage.enqueue([job("a")])
    await storage.migrate()
    assert await ids(storage) == ["a"]


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_older_tables_are_brought_forward(tmp_path: Path, version: int) -> None:
    """Jobs from before there was progress, chains or keys stay; after the migration they can do all of that."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    await SqlStorage(url).migrate()
    async with connected(SqlStorage(url)) as storage:
        await storage.enqueue([job("a")])
    with sqlite3.connect(tmp_path / "jobs.db") as database:
        database.execute("DROP TABLE workers_marks")
        database.execute("DROP INDEX workers_jobs_by_deduplication_key")
        lacking = ("deduplication_key", "deduplication_mode", "chain_index", "progress")
        for column in lacking[: 5 - version]:
            database.execute(f"ALTER TABLE workers_jobs DROP COLUMN {column}")
        database.execute("UPDATE workers_schema SET version = ?", [version])
    database.close()
    with pytest.raises(StorageError, match="migrate"):
        await SqlStorage(url).connect()
    await SqlStorage(url).migrate()
    async with connected(SqlStorage(url)) as storage:
        [claimed] = await claim(storage)
        await storage.progress([ProgressReport(claim=claimed, value=b"1")])
        assert [status and status.progress for status in await storage.status(["a"])] == [b"1"]
        await storage.settle([Continued(claim=claimed, then=job("a", chain_index=1))])
        assert [claimed.chain_index for claimed in await claim(storage)] == [1]
        keys = (Deduplication(key="k"), Deduplication(key="t", mode=DeduplicationMode.THROTTLE, ttl=MINUTE))
        for again in (False, True):
            answers = await storage.enqueue([job(f"{key.key}-{again}", deduplication=key) for key in keys])
            assert [answer.id for answer in answers] == ["k-False", "t-False"]


async def test_processes_migrate_at_once(tmp_path: Path) -> None:
    """Two processes and several threads that start together all find the tables made, once."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with child("migrate", url) as one, child("migrate", url) as other:
        go(one)
        go(other)
        await asyncio.gather(*(SqlStorage(url).migrate() for _ in range(3)))
        assert (await one.wait(), await other.wait()) == (0, 0)
    async with connected(SqlStorage(url)) as storage:
        await storage.enqueue([job("a")])
    with sqlite3.connect(tmp_path / "jobs.db") as database:
        assert database.execute("SELECT version FROM workers_schema").fetchall() == [(sql_schema.VERSION,)]
    database.close()


async def test_newer_tables_are_left_alone(url: str) -> None:
    """Tables of a version this package does not know are neither used nor changed."""
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        database.execute("UPDATE workers_schema SET version = 99")
    database.close()
    with pytest.raises(StorageError, match="version 99"):
        await SqlStorage(url).connect()
    with pytest.raises(StorageError, match="version 99"):
        await SqlStorage(url).migrate()


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("sqlite://", StorageError),
        ("sqlite:///:memory:", StorageError),
        ("sqlite:///file:jobs?uri=true", StorageError),
        ("not a url with secret", StorageError),
        ("mysql://user:secret@host/name", Unsupported),
    ],
)
def test_other_targets_are_refused(target: str, error: type[Exception]) -> None:
    """What is no SQLite file is refused when the storage is made, without telling the password."""
    with pytest.raises(error) as caught:
        SqlStorage(target)
    assert "secret" not in str(caught.value)


def test_repr_names_file_and_queue_only(tmp_path: Path) -> None:
    """The storage's repr shows no query, which might hold a key."""
    storage = SqlStorage(f"sqlite+aiosqlite:///{tmp_path}/jobs.db?key=secret", "mail")
    assert repr(storage) == f"SqlStorage('sqlite:///{tmp_path}/jobs.db', queue='mail')"


# Connections


async def test_a_locked_database_is_unavailable_and_blocks_no_loop(url: str) -> None:
    """A step that cannot get the write lock in time fails as unavailable, reads go on meanwhile, and it recovers."""
    async with connected(SqlStorage(url, busy_timeout=timedelta(milliseconds=500))) as storage:
        lock = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        blocked = asyncio.create_task(storage.enqueue([job("a")]))
        assert (await storage.counts())[JobState.QUEUED] == 0
        assert not blocked.done()
        with pytest.raises(StorageUnavailable, match="locked"):
            await blocked
        lock.execute("ROLLBACK")
        lock.close()
        await storage.enqueue([job("a")])
        assert await ids(storage) == ["a"]


async def test_a_full_disk_is_unavailable_and_changes_nothing(storage: SqlStorage) -> None:
    """A write that finds no room is undone, says so, and works again when there is room."""
    limit = await _set_page_limit(storage, 1)
    with pytest.raises(StorageUnavailable, match="full"):
        await storage.enqueue([NewJob(id="a", name="work", payload=bytes(1_000_000))])
    await _set_page_limit(storage, limit)
    assert await storage.status(["a"]) == [None]
    await storage.enqueue([NewJob(id="a", name="work", payload=bytes(1_000_000))])
    [claimed] = await claim(storage)
    assert claimed.payload == bytes(1_000_000)


async def _set_page_limit(storage: SqlStorage, pages: int) -> int:
    database = storage._database()
    pragma = "PRAGMA max_page_count"
    before = database._writer.submit(lambda connection: int(connection.exec_driver_sql(pragma).scalar_one()))
    await asyncio.wrap_future(before)
    change = database._writer.submit(lambda connection: connection.exec_driver_sql(f"{pragma} = {pages}").scalar_one())
    await asyncio.wrap_future(change)
    return before.result()


async def test_storages_on_one_file_share_threads_until_the_last_is_gone(url: str) -> None:
    """However many queues, a file has two threads; closing one queue leaves the others at work."""
    one, other = SqlStorage(url, "one"), SqlStorage(url, "other")
    before = threading.active_count()
    await one.connect()
    await other.connect()
    await one.connect()
    assert threading.active_count() == before + 2
    await one.disconnect()
    await one.disconnect()
    waiting = asyncio.create_task(other.wait(["work"], timeout=MINUTE))
    await other.enqueue([job("a")])
    await asyncio.wait_for(waiting, PATIENCE)
    with pytest.raises(StorageUnavailable, match="not connected"):
        await one.enqueue([job("a")])
    await other.disconnect()
    await until(lambda: asyncio.sleep(0, threading.active_count() == before))


def test_event_loops_one_after_another(tmp_path: Path) -> None:
    """One storage object serves a second event loop after the first has ended, even without a disconnect."""
    storage = SqlStorage(f"sqlite:///{tmp_path}/jobs.db")

    async def first() -> None:
        await storage.migrate()
        await storage.connect()
        waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
        await storage.counts()
        waiting.cancel()

    async def second() -> list[str]:
        waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
        await storage.enqueue([job("a")])
        await asyncio.wait_for(waiting, PATIENCE)
        claimed = await ids(storage)
        await storage.disconnect()
        return claimed

    asyncio.run(first())
    assert asyncio.run(second()) == ["a"]


async def test_a_cancelled_claim_gives_its_jobs_back(storage: SqlStorage) -> None:
    """A claim whose caller was cancelled while it committed leaves no job leased to nobody, and counts nothing."""
    await storage.enqueue([job("a")])
    database = storage._database()
    reached, proceed = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        reached.set()
        assert proceed.wait(PATIENCE)

    connection = await asyncio.wrap_future(database._writer.submit(lambda connection: connection))
    async with storage.subscribe("a") as events:
        event.listen(connection, "commit", hold, once=True)
        claiming = asyncio.create_task(claim(storage))
        await asyncio.to_thread(reached.wait, PATIENCE)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        proceed.set()
        while (await asyncio.wait_for(events.get(), PATIENCE)).kind is not JobEventKind.QUEUED:
            pass
    [claimed] = await claim(storage)
    assert claimed.attempt == 1


async def test_a_job_that_moves_is_counted_once(storage: SqlStorage, url: str) -> None:
    """Counting sees a job in one state, though another process releases it meanwhile."""
    await storage.enqueue([job("a")])
    await claim(storage)

    def release(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "count(*)" in statement:
            with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
                database.execute(
                    "UPDATE workers_jobs SET state = 'ready', token = NULL, worker = NULL, lease_until = NULL"
                )
            database.close()

    event.listen(Engine, "after_cursor_execute", release)
    try:
        assert sum((await storage.counts()).values()) == 1
    finally:
        event.remove(Engine, "after_cursor_execute", release)
    assert (await storage.counts())[JobState.QUEUED] == 1


# Cost

_FREE_TO_SCAN = {"workers_listeners"}  # one row per listening process


def _statements() -> Iterator[tuple[str, str]]:
    shared = (decision, endings, sql_manage, sql_marks, sql_records, recovery)
    modules = (*shared, sql_claim, sql_enqueue, sql_events, sql_leases, sql_settle)
    for module in modules:
        for name, value in vars(module).items():
            found = [value]
            if isinstance(value, dict) and name == "_LIST":
                found = [statement for statements in value.values() for statement in statements]
            elif isinstance(value, list):
                found = value
            for choice in found:
                statement = choice["sqlite"] if isinstance(choice, dict) and "sqlite" in choice else choice
                if name.endswith("_POSTGRES") or not isinstance(statement, TextClause):
                    continue
                if "SELECT workers_" not in statement.text:
                    yield f"{module.__name__}.{name}", statement.text
    yield "of_names", sql_claim.of_names(3).text


def _plan(database: sqlite3.Connection, statement: str) -> list[str]:
    statement = re.sub(r"IN :(\w+)", lambda found: f"IN ({', '.join([':' + found[1]] * 50)})", statement)
    values = dict.fromkeys(re.findall(r":(\w+)", statement), 1)
    return [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {statement}", values)]


@pytest.mark.parametrize("descending", [False, True])
async def test_no_statement_scans_a_table(url: str, descending: bool) -> None:
    """Every statement finds its rows by an index that fits; none walks through all jobs of a queue.

    Where two indexes look alike the planner goes by the order they were made in: it must not matter.
    """
    database = sqlite3.connect(url.removeprefix("sqlite:///"))
    made = "SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL ORDER BY name"
    for name, statement in database.execute(f"{made} {'DESC' if descending else 'ASC'}").fetchall():
        database.execute(f"DROP INDEX {name}")
        database.execute(statement)
    seen = 0
    for name, statement in _statements():
        seen += 1
        for line in _plan(database, statement):
            scanned = re.match(r"SCAN (workers_\w+)", line)
            assert scanned is None or scanned[1] in _FREE_TO_SCAN, (name, line)
            assert "workers_jobs_by_id (queue=?)" not in line, (name, line)
    database.close()
    assert seen > 40


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_claims_read_in_index_order(url: str, count: int) -> None:
    """The next jobs are the first of an index, for any name or for several, and are never sorted."""
    statement = sql_claim.of_names(count).text if count else sql_claim._OF_ANY_NAME.text
    database = sqlite3.connect(url.removeprefix("sqlite:///"))
    plan = _plan(database, statement)
    database.close()
    assert any("workers_jobs_ready" in line for line in plan)
    assert not any("TEMP B-TREE" in line for line in plan)


async def test_a_busy_key_holds_up_nobody_else(storage: SqlStorage) -> None:
    """A thousand jobs of one running key are stepped over, and come in order when it is free."""
    await storage.enqueue([job(f"k{number:04}", ordering_key="k") for number in range(1_000)])
    await storage.enqueue([job("other")])
    first = await claim(storage, limit=50)
    while "other" not in (found := [claimed.job_id for claimed in first]):
        first += await claim(storage, limit=50)
    assert sorted(found) == ["k0000", "other"]
    assert (await storage.counts())[JobState.QUEUED] == 999
    await storage.settle([Completed(claim=claimed, result=b"") for claimed in first])
    assert await ids(storage) == ["k0001"]


async def test_held_jobs_of_every_name_step_back(storage: SqlStorage) -> None:
    """A key's waiting jobs of a name nobody works on do not block those of another name."""
    await storage.enqueue([job("1", "one", ordering_key="k"), job("2", "idle", ordering_key="k")])
    await storage.enqueue([job("3", "one", ordering_key="k")])
    [running] = await claim(storage)
    assert await claim(storage) == []
    await storage.settle([Released(claim=running)])
    [again] = await storage.claim("worker", leases={"one": MINUTE}, limit=5)
    await storage.settle([Completed(claim=again, result=b"", keep=DROP)])
    [last] = await storage.claim("worker", leases={"one": MINUTE}, limit=5)
    assert (again.job_id, last.job_id) == ("1", "3")


async def test_removing_the_first_of_a_key_frees_the_next(storage: SqlStorage) -> None:
    """A held job steps forward when the ready one before it is removed or drained."""
    await storage.enqueue([job(name, ordering_key="k") for name in ("a", "b", "c")])
    [running] = await claim(storage)
    assert await claim(storage) == []
    await storage.settle([Completed(claim=running, result=b"")])
    assert await storage.remove(["b"]) == 1
    assert await ids(storage) == ["c"]


async def test_an_oversized_result_fails_alone(storage: SqlStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result the database cannot hold is an error of that element; its neighbour is settled."""
    monkeypatch.setattr(sql_settle, "MAX_RESULT_BYTES", 10)
    await storage.enqueue([job("a"), job("b")])
    one, other = await claim(storage)
    outcomes = await storage.settle([Completed(claim=one, result=bytes(11)), Completed(claim=other, result=b"")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]
    [status] = await storage.status(["a"])
    assert status is not None
    assert status.state is JobState.PROCESSING


async def test_an_idle_wait_asks_next_to_nothing(storage: SqlStorage) -> None:
    """While nothing is committed, a sleeping wait reads no table."""
    database = storage._database()
    statements: list[str] = []
    connection = await asyncio.wrap_future(database._reader.submit(lambda connection: connection))

    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("PRAGMA"):
            statements.append(statement)

    event.listen(connection, "before_cursor_execute", count)
    await storage.wait(["work"], timeout=timedelta(milliseconds=500))
    assert len(statements) <= 9, "three looks of three statements: first, after the watcher's first tick, last"


async def test_no_payload_is_left_behind(storage: SqlStorage, url: str) -> None:
    """However a job goes, its payload or result goes with it; a tombstone keeps neither."""
    names = ("removed", "cancelled", "drained", "dropped", "cleaned", "stalled", "again")
    await storage.enqueue([job(name, max_attempts=1, keep_failed=DROP) for name in names])
    claims = {claimed.job_id: claimed for claimed in await claim(storage)}
    await storage.settle([Released(claim=claims[name]) for name in ("removed", "cancelled", "drained")])
    await storage.settle([Completed(claim=claims["dropped"], result=b"1", keep=DROP)])
    await storage.settle([Completed(claim=claims["cleaned"], result=b"1")])
    await storage.settle([Failed(claim=claims["again"], error=ErrorInfo(type="E", message=""), keep=MINUTE)])
    await storage.renew([replace(claims["stalled"], lease=timedelta(0))])
    assert (await storage.recover(10)).failed == ("stalled",)
    await storage.enqueue([job("again", keep_failed=DROP)])
    assert await storage.remove(["removed"]) == 1
    assert await storage.cancel("cancelled") is CancelResult.CANCELLED
    assert await storage.drain() == 2
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta(0)) == 1
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        assert database.execute("SELECT id, state FROM workers_jobs").fetchall() == [("cancelled", "cancelled")]
        assert database.execute("SELECT seq FROM workers_payloads").fetchall() == []
    database.close()


def test_importing_the_package_needs_no_sqlalchemy() -> None:
    """Only the SQL modules import SQLAlchemy."""
    code = "import sys, workers, workers.storage.base, workers.jobs; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[4]).returncode == 0


def test_it_is_a_storage(tmp_path: Path) -> None:
    """Type checkers accept it as a `Storage`, and its limits declare transactions."""
    storage: Storage = SqlStorage(f"sqlite:///{tmp_path}/jobs.db", "mail")
    assert storage.queue == "mail"
    assert storage.limits.transactions
