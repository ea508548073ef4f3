"""How a process hears what others commit to an SQLite file: at once by inotify, otherwise by looking."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from functools import partial

import pytest

from tests.patience import until
from tests.workers.storage.sql.steps import MINUTE, child, claim_all, connected, database_of, go, ids, watcher_of
from workers.jobs import JobEventKind
from workers.storage.sql import SqlStorage
from workers.storage.sql.sqlite.changes import watcher as watching
from workers.storage.sql.sqlite.driver.connections import SqliteDirect, data_version
from workers.storage.sql.sqlite.driver.thread import SqliteThread
from workers.testing.steps import PATIENCE, job

_DELETED = 0x400  # IN_DELETE_SELF, which is no write


@pytest.fixture
def database() -> str:
    return "sqlite"


@pytest.fixture
def file(url: str) -> str:
    return url.removeprefix("sqlite:///")


@pytest.fixture
def no_rest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that rests looks again only when it hears something."""
    monkeypatch.setattr(watching, "REST", timedelta(hours=1))


@asynccontextmanager
async def a_waiter(storage: SqlStorage) -> AsyncIterator[asyncio.Task[None]]:
    """Somebody waits for work, whose watcher has come to rest; the block makes him go on."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    await resting(storage)
    assert not waiting.done()
    yield waiting
    await asyncio.wait_for(waiting, PATIENCE)


async def resting(storage: SqlStorage) -> None:
    await until(lambda: watcher_of(storage)._pace.rests)


def change(file: str, *statements: str) -> None:
    """Somebody who knows nothing of us commits these statements, each by itself."""
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement).fetchall()


# At once


@pytest.mark.usefixtures("no_rest_ends")
async def test_another_processs_job_is_heard(storage: SqlStorage, url: str) -> None:
    """A commit in another process ends a wait, although the watcher would not have looked for an hour."""
    async with child("enqueue", url, argument="a") as process, a_waiter(storage):
        go(process)
    assert await ids(storage) == ["a"]


@pytest.mark.usefixtures("no_rest_ends")
async def test_another_processs_events_are_heard(storage: SqlStorage, url: str) -> None:
    """So is the end of a job, and a request to cancel one."""
    await storage.enqueue([job("a"), job("b")])
    async with child("complete", url) as process, storage.subscribe("a") as events:
        await resting(storage)
        go(process)
        while (await asyncio.wait_for(events.get(), PATIENCE)).kind is not JobEventKind.COMPLETED:
            pass
    await storage.enqueue([job("c")])
    await claim_all(storage)
    async with child("cancel", url, argument="c") as process, storage.cancel_requests() as requests:
        await resting(storage)
        go(process)
        assert (await asyncio.wait_for(requests.get(), PATIENCE)).job_id == "c"


@pytest.mark.usefixtures("no_rest_ends")
async def test_the_second_of_two_who_wait_for_a_job_is_told_too(storage: SqlStorage, url: str) -> None:
    """The watcher, which nobody wanted between them, is set going again."""
    await storage.enqueue([job("a"), job("b")])
    async with child("complete", url) as process:
        async with storage.subscribe("a"):
            await resting(storage)
        await storage.counts()  # after which the watcher waits for its next task, and for nothing else
        async with storage.subscribe("b") as events:
            go(process)
            while (await asyncio.wait_for(events.get(), PATIENCE)).kind is not JobEventKind.COMPLETED:
                pass


@pytest.mark.usefixtures("no_rest_ends")
async def test_a_checkpoint_that_empties_the_log_hides_nothing(storage: SqlStorage, url: str, file: str) -> None:
    """The log is cut to nothing and begun anew; what is written to it then is heard."""
    change(file, "PRAGMA wal_checkpoint(TRUNCATE)")
    async with child("enqueue", url, argument="a") as process, a_waiter(storage):
        change(file, "PRAGMA wal_checkpoint(TRUNCATE)")
        assert os.stat(f"{file}-wal").st_size == 0
        await resting(storage)
        go(process)


@pytest.mark.usefixtures("no_rest_ends")
async def test_a_log_made_anew_is_watched(storage: SqlStorage, url: str, file: str) -> None:
    """When the last connections to the file broke, SQLite deleted the log; the next one is another file."""
    database = database_of(storage)
    async with a_waiter(storage):
        ear = watcher_of(storage)._ear
        assert ear is not None
        before = ear._watched
        for thread in (database._writer, database._reader):
            await asyncio.wrap_future(thread.submit(partial(_break, thread)))
        await until(lambda: ear._watched != before)
        await resting(storage)
        async with child("enqueue", url, argument="a") as process:
            go(process)
            await process.wait()


def _break(thread: SqliteThread, _: object) -> None:
    thread._close()


@pytest.mark.usefixtures("no_rest_ends")
async def test_others_are_heard_beside_our_own_commits(storage: SqlStorage, url: str) -> None:
    """A commit of our own right behind another's hides that from nobody, whatever the watcher was doing meanwhile."""
    async with (
        connected(SqlStorage(url, "other")) as other,
        child("enqueue", url, argument="a") as process,
        a_waiter(storage),
    ):
        release = block(watcher_of(storage))
        go(process)
        await process.wait()
        await other.enqueue([job("b")])
        release.set()


@pytest.mark.usefixtures("no_rest_ends")
async def test_others_are_heard_while_our_writer_is_at_work(storage: SqlStorage, url: str) -> None:
    """As long as our own step lasts, nobody can say who has committed; the waiter looks all the same."""
    async with child("enqueue", url, argument="a") as process:
        async with a_waiter(storage):
            release = block(database_of(storage)._writer)
            go(process)
        release.set()


@pytest.mark.usefixtures("no_rest_ends")
async def test_others_are_heard_while_our_writers_connection_is_broken(storage: SqlStorage, url: str) -> None:
    """It is of no use to ask it who has committed; the waiter looks all the same."""
    writer = database_of(storage)._writer
    async with child("enqueue", url, argument="a") as process, a_waiter(storage):
        await asyncio.wrap_future(writer.submit(lambda connection: SqliteDirect(connection)._driver.close()))
        go(process)
    await asyncio.wrap_future(writer.submit(partial(_break, writer)))


@pytest.mark.usefixtures("no_rest_ends")
async def test_others_are_heard_although_our_writer_connects_anew(storage: SqlStorage, url: str) -> None:
    """What its new connection says of others' commits counts from its own beginning, and is no answer about those."""
    writer = database_of(storage)._writer
    async with child("enqueue", url, argument="a") as process, a_waiter(storage):
        release = block(watcher_of(storage))
        go(process)
        await process.wait()
        await asyncio.wrap_future(writer.submit(partial(_break, writer)))
        await asyncio.wrap_future(writer.submit(data_version))
        release.set()


@pytest.mark.usefixtures("no_rest_ends")
async def test_our_own_commits_wake_nobody(storage: SqlStorage) -> None:
    """Who holds back wake-ups until a block ends is not given away by the watcher, which has heard the writes."""
    async with a_waiter(storage) as waiting, storage.with_notify():
        for number in range(3):
            seen = database_of(storage)._seen
            await storage.enqueue([job(f"held {number}")])
            await until(partial(_saw_more, storage, seen))
            await resting(storage)
        assert not waiting.done()


def _saw_more(storage: SqlStorage, seen: int | None) -> bool:
    return database_of(storage)._seen != seen


def block(thread: SqliteThread) -> threading.Event:
    """The thread does nothing until the event is set."""
    release = threading.Event()
    thread.submit(lambda _: release.wait(10 * PATIENCE))
    return release


# By looking


@pytest.mark.usefixtures("no_inotify")
async def test_without_inotify_the_watcher_looks(storage: SqlStorage, url: str) -> None:
    """On a system that has none, a look every 50 ms finds what another process has committed."""
    await _hears_by_looking(storage, url)


async def test_on_a_python_without_eventfd_the_watcher_looks(
    storage: SqlStorage, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has it only if the system that it was built on had it."""
    monkeypatch.delattr(os, "eventfd")
    await _hears_by_looking(storage, url)


async def _hears_by_looking(storage: SqlStorage, url: str) -> None:
    before = open_here()
    async with child("enqueue", url, argument="a") as process:
        waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
        await until(lambda: watcher_of(storage)._watched_until)
        assert watcher_of(storage)._ear is None
        go(process)
        await asyncio.wait_for(waiting, PATIENCE)
    assert open_here() == before


async def test_a_process_that_may_open_nothing_more_looks(storage: SqlStorage, url: str) -> None:
    """It hears by looking; when it may open files again, the watcher finds that out by itself."""
    async with child("wait_without_descriptors", url) as process:
        assert process.stdout is not None
        go(process)
        await storage.enqueue([job("a")])
        async with asyncio.timeout(3 * PATIENCE):
            assert await process.stdout.readline() == b"heard\n"
            assert await process.stdout.readline() == b"listens\n"


async def test_an_inotify_that_tells_nothing_is_not_relied_on(
    storage: SqlStorage, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that keeps its writes to itself, one is found after a rest, the others as without inotify."""
    monkeypatch.setattr(watching, "_WRITTEN", _DELETED)
    watcher = watcher_of(storage)
    async with child("enqueue", url, argument="a") as process:
        async with a_waiter(storage):
            go(process)
        assert not watcher._relies
    await claim_all(storage)
    monkeypatch.setattr(watching, "REST", timedelta(hours=1))
    async with child("enqueue", url, argument="b") as process:
        waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
        await until(lambda: watcher._pace._gap == watching.POLL.total_seconds())
        go(process)
        await asyncio.wait_for(waiting, PATIENCE)


# What it takes


async def test_many_queues_have_one_watcher_that_leaves_nothing_open(url: str) -> None:
    """However many queues and waiters a process has on a file, one inotify serves all; the last one closes it."""
    before = open_here()
    for number in range(3):
        async with connected(SqlStorage(url, "one")) as one, connected(SqlStorage(url, "other")) as other:
            waiting = [asyncio.create_task(each.wait(["work"], timeout=MINUTE)) for each in (one, other, one)]
            await resting(other)
            assert open_here() - before == Counter(inotify=1, eventfd=1)
            for each in (one, other):
                await each.enqueue([job(f"{number}")])
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*waiting)
            await claim_all(one)
            await claim_all(other)
        assert open_here() == before


async def test_what_nobody_reads_does_not_pile_up(storage: SqlStorage, file: str) -> None:
    """Any number of writes while nobody waits are one event in the kernel."""
    async with a_waiter(storage):
        await storage.enqueue([job("a")])
    await storage.counts()  # after which the watcher waits for its next task, and for nothing else
    ear = watcher_of(storage)._ear
    assert ear is not None
    change(file, *["UPDATE workers_jobs SET priority = priority"] * 500)
    assert len(os.read(ear._inotify, 1 << 20)) <= 64


def open_here() -> Counter[str]:
    """How many of this process's descriptors are for hearing of writes."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            kind, _, what = os.readlink(f"/proc/self/fd/{name}").partition(":")
            found.update({what.strip("[]")} & {"inotify", "eventfd"} if kind == "anon_inode" else ())
    return found
