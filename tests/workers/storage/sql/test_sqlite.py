"""What `SqlStorage` promises on SQLite alone: one file, whatever becomes of it, and its threads."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from tests.workers.harnesses import SqliteHarness
from tests.workers.storage.sql.steps import MINUTE, child, claim_all, connected, database_of, go, ids, watcher_of
from workers.clock import ManualClock
from workers.errors import StorageError, StorageUnavailable, Unsupported
from workers.jobs import DROP, CancelResult, Completed, ErrorInfo, Failed, JobEventKind, JobState, Released
from workers.storage.base import Storage
from workers.storage.sql import SqlStorage
from workers.storage.sql.sqlite.driver.connections import SqliteDirect
from workers.testing import Case, all_cases, run
from workers.testing.steps import PATIENCE, claim, job, until


@pytest.fixture
def database() -> str:
    return "sqlite"


_NEARBY = [case for case in all_cases() if case.verb in ("wait", "events", "cancel")]


@pytest.mark.usefixtures("no_watcher")
@pytest.mark.parametrize("case", _NEARBY, ids=lambda case: case.id)
async def test_one_process_needs_no_poll(case: Case, tmp_path: Path) -> None:
    """Within a process the step that changes something tells waiters and subscribers; no watcher has to notice it."""
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


async def test_another_processs_cancel_request_is_told(storage: SqlStorage, url: str) -> None:
    """Who listens for cancel requests alone hears of one from another process, and has no other event written down."""
    await storage.enqueue([job("a"), job("b")])
    await claim_all(storage)
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
    await claim_all(storage)
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


async def test_results_that_are_soon_gone_travel_between_processes(storage: SqlStorage, url: str) -> None:
    """They are written down beside the event for a process that listens, and read from there; others are not."""
    await storage.enqueue([job("short", keep=DROP), job("long")])
    claims = await claim_all(storage)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        database.execute("INSERT INTO workers_listeners SELECT id, 'other', 1 << 60 FROM workers_queues")
        database.commit()
        await storage.settle([Completed(claim=claim, result=b"1") for claim in claims])
        written = database.execute("SELECT job_id, result FROM workers_events WHERE kind = 'completed'").fetchall()
        assert written == [("short", b"1"), ("long", None)]
        async with storage.subscribe("elsewhere") as events:
            database.execute(
                "INSERT INTO workers_events (queue, process, kind, job_id, at, result)"
                " SELECT id, 'other', 'completed', 'elsewhere', 0, x'32' FROM workers_queues"
            )
            database.commit()
            heard = await asyncio.wait_for(events.get(), PATIENCE)
    database.close()
    assert (heard.kind, heard.result) == (JobEventKind.COMPLETED, b"2")


@pytest.mark.usefixtures("no_inotify")
async def test_whoever_subscribes_waits_until_others_know_of_it(url: str) -> None:
    """Also if somebody else here is about to tell them: an end that they commit before that is written down nowhere."""
    async with connected(SqlStorage(url, busy_timeout=timedelta(seconds=1))) as storage:
        waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as lock:
            lock.execute("BEGIN IMMEDIATE")
            first = asyncio.create_task(_subscribe(storage, "a"))
            await asyncio.sleep(0)
            looked = watcher_of(storage)._pace._looked
            await until(lambda: watcher_of(storage)._pace._looked > looked)
            both = await asyncio.gather(first, _subscribe(storage, "b"), return_exceptions=True)
            assert [type(each) for each in both] == [StorageUnavailable, StorageUnavailable]
        waiting.cancel()


async def _subscribe(storage: SqlStorage, job_id: str) -> None:
    async with storage.subscribe(job_id):
        pass


async def test_events_are_written_down_for_other_processes_only(storage: SqlStorage, url: str) -> None:
    """With no other process listening, events cost no row."""
    async with storage.events():
        await storage.enqueue([job("a")])
        await claim_all(storage)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        assert database.execute("SELECT count(*) FROM workers_events").fetchone() == (0,)
        assert database.execute("SELECT count(*) FROM workers_listeners").fetchone() == (1,)
    database.close()


def test_a_forked_process_opens_its_own(tmp_path: Path) -> None:
    """A fork finds none of its parent's threads: what the parent connected says so at once, a new storage works.

    So it is even if a thread of the parent was giving another one work at that moment.
    """
    code = f"""
import asyncio, os
from tests.patience import until
from tests.workers.storage.sql.steps import database_of, watcher_of
from workers.errors import StorageError
from workers.storage.sql import SqlStorage

async def child(parents, url):
    try:
        await parents.counts()
    except StorageError as error:
        assert "forked" in str(error), error
    assert watcher_of(parents)._ear is not None
    await parents.disconnect()
    for number in os.listdir("/proc/self/fd"):
        assert not os.path.exists(path := f"/proc/self/fd/{{number}}") or "inotify" not in os.readlink(path)
    mine = SqlStorage(url)
    await mine.connect()
    await mine.counts()
    await mine.disconnect()

async def parent(storage):
    await storage.migrate()
    await storage.connect()
    async with storage.cancel_requests():
        await until(lambda: watcher_of(storage)._ear is not None)

url = "sqlite:///{tmp_path}/jobs.db"
storage = SqlStorage(url)
asyncio.run(parent(storage))
with database_of(storage)._writer._lock, watcher_of(storage)._lock:
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


# Files and tables


async def test_a_missing_file_is_not_made(tmp_path: Path) -> None:
    """Who connects to a file that is not there is told to migrate, and no file appears; nor does a directory."""
    missing = tmp_path / "missing.db"
    with pytest.raises(StorageError, match="migrate"):
        await SqlStorage(f"sqlite:///{missing}").connect()
    assert not missing.exists()
    with pytest.raises(StorageError, match="directory"):
        await SqlStorage(f"sqlite:///{tmp_path}/no/such/jobs.db").migrate()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """Foreign content is a `StorageError`, not something to retry."""
    (tmp_path / "jobs.db").write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(StorageError, match="not an SQLite database"):
        await SqlStorage(f"sqlite:///{tmp_path}/jobs.db").migrate()


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
    async with connected(SqlStorage(url, busy_timeout=timedelta(seconds=2))) as storage:
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
        await storage.enqueue([job("a", payload=bytes(1_000_000))])
    await _set_page_limit(storage, limit)
    assert await storage.status(["a"]) == [None]
    await storage.enqueue([job("a", payload=bytes(1_000_000))])
    [claimed] = await claim_all(storage)
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
    await until(lambda: threading.active_count() == before)


async def test_a_cancelled_disconnect_still_ends_the_threads(storage: SqlStorage) -> None:
    """Whoever waited for the end gave up; both threads end all the same, without an exception in either."""
    proceed = threading.Event()
    writer, reader = storage._database()._writer, storage._database()._reader
    writer.submit(lambda connection: proceed.wait(PATIENCE))
    closing = asyncio.create_task(storage.disconnect())
    await until(lambda: writer._stopped is not None)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    proceed.set()
    await until(lambda: not (writer._thread.is_alive() or reader._thread.is_alive()))


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
        claiming = asyncio.create_task(claim_all(storage))
        await asyncio.to_thread(reached.wait, PATIENCE)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        proceed.set()
        while (await asyncio.wait_for(events.get(), PATIENCE)).kind is not JobEventKind.QUEUED:
            pass
    [claimed] = await claim_all(storage)
    assert claimed.attempt == 1


# Jobs that stand aside, and what is left of jobs


async def test_a_claim_goes_on_behind_held_jobs(storage: SqlStorage) -> None:
    """It brings as many jobs as were asked for, each once, although some in front had to stand aside."""
    await storage.enqueue([job("running", ordering_key="k")])
    assert await ids(storage) == ["running"]
    await storage.enqueue([job("free-1"), job("k-1", ordering_key="k"), job("k-2", ordering_key="k")])
    await storage.enqueue([job("free-2"), job("free-3"), job("free-4")])
    assert [claimed.job_id for claimed in await claim(storage, 3)] == ["free-1", "free-2", "free-3"]


async def test_any_number_of_jobs_may_stand_aside_at_once(storage: SqlStorage) -> None:
    """Also more of them than this SQLite takes values in one statement."""

    def limit(connection: Connection) -> None:
        SqliteDirect(connection)._driver.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 1_000)

    await asyncio.wrap_future(database_of(storage)._writer.submit(limit))
    await storage.enqueue([job(f"{number}", ordering_key="k") for number in range(1_500)])
    assert await ids(storage) == ["0"]


async def test_of_due_jobs_the_highest_priority_comes_first(url: str) -> None:
    """Even where a job of a lower one fell due before it, and only one is asked for."""
    clock = ManualClock()
    async with connected(SqlStorage(url, clock=clock)) as storage:
        await storage.enqueue([job("sooner", priority=9, delay=MINUTE), job("later", priority=1, delay=2 * MINUTE)])
        clock.advance(3 * MINUTE)
        assert [claimed.job_id for claimed in await claim(storage, 1)] == ["later"]


async def test_as_many_due_jobs_come_as_are_asked_for(url: str) -> None:
    """More than one statement handles at a time."""
    clock = ManualClock()
    async with connected(SqlStorage(url, clock=clock)) as storage:
        await storage.enqueue([job(f"job-{number}", delay=MINUTE) for number in range(1_500)])
        clock.advance(MINUTE)
        assert len(await claim(storage, 1_500)) == 1_500


async def test_held_jobs_of_every_name_step_back(storage: SqlStorage) -> None:
    """A key's waiting jobs of a name nobody works on do not block those of another name."""
    await storage.enqueue([job("1", name="one", ordering_key="k"), job("2", name="idle", ordering_key="k")])
    await storage.enqueue([job("3", name="one", ordering_key="k")])
    [running] = await claim_all(storage)
    assert await claim_all(storage) == []
    await storage.settle([Released(claim=running)])
    [again] = await storage.claim("worker", leases={"one": MINUTE}, limit=5)
    await storage.settle([Completed(claim=again, result=b"", keep=DROP)])
    [last] = await storage.claim("worker", leases={"one": MINUTE}, limit=5)
    assert (again.job_id, last.job_id) == ("1", "3")


async def test_removing_the_first_of_a_key_frees_the_next(storage: SqlStorage) -> None:
    """A held job steps forward when the ready one before it is removed or drained."""
    await storage.enqueue([job(name, ordering_key="k") for name in ("a", "b", "c")])
    [running] = await claim_all(storage)
    assert await claim_all(storage) == []
    await storage.settle([Completed(claim=running, result=b"")])
    assert await storage.remove(["b"]) == 1
    assert await ids(storage) == ["c"]


async def test_no_payload_is_left_behind(storage: SqlStorage, url: str) -> None:
    """However a job goes, its payload or result goes with it."""
    names = ("removed", "cancelled", "drained", "dropped", "cleaned", "stalled", "again")
    await storage.enqueue([job(name, max_attempts=1, keep_failed=DROP) for name in names])
    claims = {claimed.job_id: claimed for claimed in await claim_all(storage)}
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
        assert database.execute("SELECT id, state FROM workers_jobs").fetchall() == []
        assert database.execute("SELECT seq FROM workers_payloads").fetchall() == []
    database.close()


def test_importing_the_package_needs_no_sqlalchemy() -> None:
    """Only the SQL modules import SQLAlchemy."""
    code = "import sys, workers, workers.storage.base, workers.jobs; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[4]).returncode == 0


def test_it_is_a_storage(tmp_path: Path) -> None:
    """Type checkers accept it as a `Storage`, and its capabilities declare transactions."""
    storage: Storage = SqlStorage(f"sqlite:///{tmp_path}/jobs.db", "mail")
    assert storage.queue == "mail"
    assert storage.capabilities.transactions
