"""A queue for plain code, on every kind of storage: from any thread, after a fork, at the interpreter's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import workers
from tests import warm
from tests.patience import PATIENCE_SECONDS
from workers import EnqueueStatus, JobState, StorageError, Unsupported, Worker
from workers.background import background
from workers.errors import ForeignLoop
from workers.jobs import CancelResult
from workers.storage import open_storage
from workers.sync import Queue


@pytest.fixture(params=["sqlite", "postgres", "file", "redis", "bullmq", "bull"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a queue of this test's own lives, ready to be used."""
    if request.param == "sqlite":
        found = f"sqlite:///{tmp_path}/jobs.db"
    elif request.param == "postgres":
        found = request.getfixturevalue("postgres_url").replace("+psycopg", "")
    elif request.param == "file":
        found = f"file://{tmp_path}/queues"
    else:
        schemes = {"redis": "", "bullmq": "bullmq+", "bull": "bull+"}
        found = schemes[request.param] + request.getfixturevalue("redis_url")
    storage = open_storage(found, queue="migrating")
    if hasattr(storage, "migrate"):
        asyncio.run(storage.migrate())
    return found


@pytest.fixture
def name() -> str:
    return f"q-{uuid.uuid4().hex}"


@pytest.fixture
def queue(url: str, name: str) -> Iterator[Queue]:
    with Queue(open_storage(url, queue=name)) as made:
        yield made


@pytest.fixture
def working(url: str, name: str) -> Iterator[None]:
    """A worker of another loop doubles payloads."""

    async def double(job: workers.Job) -> int:
        assert isinstance(job.payload, int)
        return 2 * job.payload

    worker = Worker(open_storage(url, queue=name), {"*": double})

    async def work() -> None:
        await worker.run()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(work()))
    thread.start()
    yield
    loop.call_soon_threadsafe(worker.stop)
    thread.join(PATIENCE_SECONDS)
    loop.close()


def test_plain_code_asks_and_is_answered(queue: Queue, working: None) -> None:
    """enqueue_and_wait, get_result and get_status."""
    assert queue.enqueue_and_wait(21, id="job-1") == 42
    assert queue.get_result("job-1") == 42
    status = queue.get_status("job-1")
    assert status is not None
    assert status.state is JobState.COMPLETED


def test_plain_code_enqueues_counts_and_cancels(queue: Queue) -> None:
    """As the asynchronous queue does."""
    assert queue.enqueue(1, id="job-2").status is EnqueueStatus.QUEUED
    assert queue.enqueue(1, id="job-2").status is EnqueueStatus.DUPLICATE
    many = queue.enqueue_many([workers.JobSpec(payload=number) for number in range(3)])
    assert len({each.id for each in many}) == 3
    assert queue.counts()[JobState.QUEUED] == 4
    assert queue.cancel("job-2") is CancelResult.CANCELLED
    status = queue.get_status("job-2")
    assert status is not None
    assert status.state is JobState.CANCELLED


def test_eight_threads_share_a_queue(queue: Queue) -> None:
    """What each enqueued is there once."""
    failures: list[BaseException] = []

    def enqueue() -> None:
        try:
            for number in range(25):
                queue.enqueue(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=enqueue) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert failures == []
    assert queue.counts()[JobState.QUEUED] == 200


def test_a_closed_queue_is_connected_again(queue: Queue) -> None:
    """By its next use."""
    queue.enqueue(1)
    queue.close()
    queue.close()
    queue.enqueue(1)
    assert queue.counts()[JobState.QUEUED] == 2


def test_an_asynchronous_queue_outlives_its_event_loop(url: str, name: str) -> None:
    """`asyncio.run` again and again."""
    queue = workers.Queue(open_storage(url, queue=name))
    for number in range(3):
        asyncio.run(queue.enqueue(number))
    assert asyncio.run(queue.counts())[JobState.QUEUED] == 3


def test_an_asynchronous_queue_is_refused_in_a_second_loop_at_once(url: str, name: str) -> None:
    """Before anything is written, with what to do."""
    queue = workers.Queue(open_storage(url, queue=name))

    async def first() -> dict[JobState, int]:
        await queue.enqueue(1)

        def elsewhere() -> None:
            with pytest.raises(ForeignLoop, match=r"workers\.sync\.Queue"):
                asyncio.run(queue.enqueue(2))

        await asyncio.to_thread(elsewhere)
        return await queue.counts()

    assert asyncio.run(first())[JobState.QUEUED] == 1


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """The application's own engine on the queue's database."""
    if not url.startswith(("sqlite", "postgresql")):
        pytest.skip("no SQL database")
    made = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    yield made
    made.dispose()


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_jobs_of_a_transaction_wait_for_nothing(queue: Queue, engine: Engine) -> None:
    """The queue's first use may be in a transaction that holds the write lock: jobs come and go with it."""
    with Session(engine) as session:
        session.execute(text("CREATE TABLE mine (id INTEGER)"))
        session.execute(text("INSERT INTO mine VALUES (1)"))
        queue.enqueue(1, id="undone", connection=session)
        session.rollback()
        queue.enqueue(1, id="kept", connection=session)
        session.commit()
    with engine.begin() as connection:
        queue.enqueue_many([workers.JobSpec(payload=2, id="bare")], connection=connection)
    assert queue.get_status("undone") is None
    assert queue.get_status("kept") is not None
    assert queue.get_status("bare") is not None


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_a_connection_to_another_database_is_refused(queue: Queue, tmp_path: Path) -> None:
    """Nothing of the job is written."""
    elsewhere = create_engine(f"sqlite:///{tmp_path}/elsewhere.db")
    with elsewhere.begin() as connection, pytest.raises(StorageError, match="another database"):
        queue.enqueue(1, connection=connection)
    with elsewhere.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar_one() == 0
    elsewhere.dispose()
    assert queue.counts()[JobState.QUEUED] == 0


@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_a_queue_elsewhere_joins_no_transaction(queue: Queue) -> None:
    with pytest.raises(Unsupported, match="after it has committed"):
        queue.enqueue(1, connection=object())


def test_the_background_loop_does_not_wait_for_itself() -> None:
    """Plain code that a coroutine of it calls is refused, and told what to call."""

    async def inside() -> None:
        with pytest.raises(RuntimeError, match="await the asynchronous call"):
            background.run(inside)

    background.run(inside)


CHILD = """
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of a fork beside a thread
from workers.storage import open_storage
from workers.sync import Queue

queue = Queue(open_storage(sys.argv[1], queue=sys.argv[2]))
queue.enqueue("before")
children = []
for number in range(3):
    child = os.fork()
    if not child:
        try:
            queue.enqueue("child")
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        if number:
            sys.exit(0)  # the interpreter's end, in a child
        os._exit(0)
    children.append(child)
queue.enqueue("after")
ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
threads = [threading.Thread(target=queue.enqueue, args=("thread",)) for _ in range(4)]
[thread.start() for thread in threads]
queue.enqueue("last")  # and the end, with threads still at it
sys.exit(max(ended))
"""


def test_a_queue_is_used_after_a_fork_and_at_the_end(url: str, name: str) -> None:
    """By parent and children; all of them end, in silence, and nothing is lost."""
    if url.startswith("postgresql") and sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)):
        pytest.skip("this Python starts no thread once its end has begun, as others do, so connections are not closed")
    command = [warm.PYTHON, "-c", CHILD, url, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with Queue(open_storage(url, queue=name)) as queue:
        assert queue.counts()[JobState.QUEUED] == 3 + 3 + 4
