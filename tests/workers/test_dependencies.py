"""Jobs that follow others, as applications enqueue them, and jobs that handlers let follow."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from workers import Job, JobFailedError, JobSpec, JobState, Queue, Tasks, UnrecoverableError, Unsupported, continue_with
from workers.errors import UnknownDependency
from workers.follow_ups import FollowUp
from workers.jobs import AfterFailure, Completed, JobRef
from workers.storage.bull import BullStorage
from workers.storage.file import FileStorage
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.sync import SyncQueue
from workers.testing.steps import LEASE, job, until
from workers.worker.attempt import Attempt


async def test_a_graph_of_jobs_runs_in_its_order() -> None:
    """Of one call and of several, through a queue with a worker; one that failed keeps its dependents from running."""
    ran: list[str] = []

    async def work(job: Job) -> str:
        ran.append(job.id)
        if job.payload == "fail":
            raise UnrecoverableError("no")
        return job.id

    queue = Queue(MemoryStorage(), concurrency=5)
    queue.execute(work)
    async with queue:
        await queue.manage.pause()
        await queue.enqueue_many(
            [JobSpec(payload=1, id="a"), JobSpec(payload=1, id="b"), JobSpec(payload="fail", id="c", after=["a", "b"])]
        )
        await queue.enqueue(1, id="d", after=["c"])
        here = queue.storage.queue
        assert list(await queue.manage.followed("c")) == [JobRef(here, "a"), JobRef(here, "b")]
        assert list(await queue.manage.followers("c")) == [JobRef(here, "d")]
        await queue.manage.resume()
        assert await queue.enqueue_and_wait(1, id="e", after=["a", "c"], after_failure="run") == "e"
        with pytest.raises(JobFailedError, match=r"DependencyFailed: job .c.*no"):
            await queue.get_result("d")
    assert (sorted(ran[:2]), ran[2:]) == (["a", "b"], ["c", "e"])


async def test_what_cannot_be_followed_is_refused() -> None:
    """An unknown job, a text in place of ids; the neighbours of a concurrent call are not refused with it."""
    queue = Queue(MemoryStorage())
    told = await asyncio.gather(
        queue.enqueue(1, id="one"),
        queue.enqueue(2, id="two", after=["unknown"]),
        queue.enqueue(3, id="three"),
        return_exceptions=True,
    )
    assert isinstance(told[1], UnknownDependency)
    assert (told[1].job_id, told[1].unknown) == ("two", ("unknown",))
    assert (await queue.counts())[JobState.QUEUED] == 2
    with pytest.raises(TypeError, match="several jobs"):
        await queue.enqueue(1, after="one")
    with pytest.raises(ValueError, match="perhaps"):
        await queue.enqueue(1, after=["one"], after_failure="perhaps")  # type: ignore[arg-type]  # a wrong word


def test_plain_code_enqueues_dependents() -> None:
    """The synchronous queue takes the same options."""
    with SyncQueue(MemoryStorage()) as queue:
        queue.enqueue(1, id="one")
        queue.enqueue(2, id="two", after=["one"])
        status = queue.get_status("two")
        assert status is not None
        assert (status.state, status.waits_for) == (JobState.WAITING, 1)


async def test_tasks_follow_jobs() -> None:
    """A task runs after jobs of its queue; a queue that lets no job wait refuses."""
    queue = Queue(MemoryStorage())
    tasks = Tasks(queue)

    @tasks.task("report")
    async def report(job: Job) -> None:
        """Do nothing."""

    first = await tasks.enqueue_task(report, 1)
    second = await tasks.enqueue_task(report, 2, after=[first.id], after_failure=AfterFailure.RUN)
    await queue.enqueue_many([tasks.spec(report, 3, after=[second.id])])
    assert (await queue.counts())[JobState.WAITING] == 2

    bull = Tasks(Queue(BullStorage("redis://localhost:1", "q")))
    with pytest.raises(Unsupported, match="report"):
        await bull.enqueue_task(bull.task("report")(report.fn), 1, after=["x"])


async def test_a_caller_s_transaction_has_the_whole_of_it(tmp_path: Path) -> None:
    """Dependents enqueued in a transaction wait when it commits, and are nowhere if it is rolled back."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/q.db")
    storage = SqlStorage(engine, "q")
    await storage.migrate()
    queue = Queue(storage)
    await queue.enqueue(1, id="first")
    async with engine.connect() as connection:
        await queue.enqueue(2, id="second", after=["first"], connection=connection)
        await connection.rollback()
    assert await queue.get_status("second") is None
    async with engine.begin() as connection:
        await queue.enqueue(2, id="second", after=["first"], connection=connection)
    [held] = await storage.claim("w", leases={"*": LEASE}, limit=5)
    async with engine.begin() as connection:
        await storage.settle([Completed(claim=held, result=b"1")], connection=connection)
        await connection.execute(text("CREATE TABLE mine (id INTEGER)"))
    assert [one.job_id for one in await storage.claim("w", leases={"*": LEASE}, limit=5)] == ["second"]
    await queue.stop()
    await engine.dispose()


async def test_jobs_of_other_queues_are_followed_in_a_caller_s_transaction(tmp_path: Path) -> None:
    """As those of its own, which may be named in full, too. One that is alone in its queue refuses others by name."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/q.db")
    letters, bills = SqlStorage(engine, "letters"), SqlStorage(engine, "bills")
    await letters.migrate()
    async with Queue(letters) as post, Queue(bills) as accounts:
        await accounts.enqueue(1, id="bill")
        await post.enqueue(1, id="envelope")
        follows = [JobRef("bills", "bill"), JobRef("letters", "envelope")]
        async with engine.connect() as connection:
            await post.enqueue(2, id="letter", after=follows, connection=connection)
            await connection.rollback()
        assert await post.get_status("letter") is None
        async with engine.begin() as connection:
            await post.enqueue(2, id="letter", after=follows, connection=connection)
        [envelope] = await letters.claim("w", leases={"*": LEASE}, limit=5)
        await letters.settle([Completed(claim=envelope, result=b"1")])
        [bill] = await bills.claim("w", leases={"*": LEASE}, limit=5)
        async with engine.begin() as connection:
            await bills.settle([Completed(claim=bill, result=b"1")], connection=connection)
        assert [one.job_id for one in await letters.claim("w", leases={"*": LEASE}, limit=5)] == ["letter"]
    await engine.dispose()
    with pytest.raises(Unsupported, match="'bill' of queue 'bills'"):
        await Queue(MemoryStorage()).enqueue(2, after=[JobRef("bills", "bill")])
    with pytest.raises(TypeError, match="not one"):
        await Queue(MemoryStorage()).enqueue(2, after=JobRef("bills", "bill"))


# What handlers let follow


async def _run(handler: object, *wanted: str) -> Queue:
    """Run the job `first`, and wait until those that are wanted have ended."""
    queue = Queue(MemoryStorage())
    queue.execute(handler)  # type: ignore[arg-type]  # a handler of some kind
    async with queue:
        await queue.enqueue("payload", id="first", name="first", max_attempts=1, priority=3)
        for job_id in ("first", *wanted):
            await _ended(queue.wait_for_job_chain_completion(job_id, timedelta(seconds=30)))
    return queue


async def _ended(waiting: Awaitable[object]) -> None:
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_handler_lets_a_job_follow() -> None:
    """It is enqueued with the completion, with the options given and the others of the job before it."""
    seen: list[Job] = []

    async def work(job: Job) -> str:
        seen.append(job)
        if job.name == "first":
            assert job.then("second", {"n": 1}, id="next", max_attempts=7) == "next"
            with pytest.raises(RuntimeError, match="before"):
                job.then("third", None)
        return "done"

    queue = await _run(work, "next")
    second = seen[1]
    assert (second.id, second.name, second.payload, second.max_attempts) == ("next", "second", {"n": 1}, 7)
    status = await queue.get_status("next")
    assert status is not None
    assert (status.priority, status.chain_index) == (3, 0)
    assert await queue.get_result("first") == "done"


async def test_a_chain_goes_on_after_others() -> None:
    """A handler names those that the next link of its chain waits for."""
    ran: list[str] = []

    async def work(job: Job) -> object:
        ran.append(job.name)
        if job.name == "order":
            return continue_with("ship", job.payload, after=["packed"], after_failure="run")
        if job.name == "pack":
            raise UnrecoverableError("no box")
        return job.payload

    queue = Queue(MemoryStorage())
    queue.execute(work)
    async with queue:
        await queue.enqueue(1, name="pack", id="packed", delay=timedelta(hours=1))
        await queue.start_job_chain("order", 7, id="chain")
        waiting = asyncio.create_task(queue.wait_for_job_chain_completion("chain"))
        await until(lambda: queue.manage.followed("chain"))
        await queue.manage.promote(["packed"])
        assert await waiting == 7
        await queue.start_job_chain("order", 7, id="other", delay=timedelta(hours=1))
        with pytest.raises(ValueError, match="follows no other"):
            await queue.complete_job_chain("other", continue_with("ship", 1, after=["packed"]))
    assert ran == ["order", "pack", "ship"]


async def test_what_follows_waits_for_others_too() -> None:
    """It runs when those have completed as well, whoever enqueued them; of another queue only where that is known."""
    ran: list[str] = []

    async def work(job: Job) -> None:
        ran.append(job.id)
        if job.id == "first":
            job.then("last", 1, id="last", after=["slow"])
        if job.id == "far":
            job.then("last", 1, after=[JobRef("elsewhere", "slow")])

    queue = Queue(MemoryStorage(), concurrency=1)
    queue.execute(work)
    async with queue:
        await queue.enqueue(1, id="slow", delay=timedelta(hours=1))
        await queue.enqueue_and_wait(1, id="first")
        assert list(await queue.manage.followers("slow")) == [JobRef(queue.storage.queue, "last")]
        with pytest.raises(JobFailedError, match="follow those of their queue only"):
            await queue.enqueue_and_wait(1, id="far")
        await queue.manage.promote(["slow"])
        await queue.enqueue_and_wait(1, id="after all", after=["last"])
    assert ran == ["first", "far", "slow", "last", "after all"]


@pytest.mark.parametrize("way", ["fails", "continues", "cannot be encoded"])
async def test_nothing_follows_an_attempt_that_does_not_complete(way: str) -> None:
    """A failed attempt, or one whose follow-up cannot be, enqueues nothing."""

    async def work(job: Job) -> object:
        job.then("second", object() if way == "cannot be encoded" else None, id="next")
        if way == "fails":
            raise ValueError("no")
        return continue_with("first", 1) if way == "continues" else None

    queue = await _run(work)
    assert await queue.get_status("next") is None
    assert (await queue.counts())[JobState.FAILED] == 1


async def test_without_a_worker_nothing_can_follow() -> None:
    """In a test of a handler, under a stock worker of BullMQ, or on a foreign queue, the job would be lost."""
    alone = Job(id="1", name="alone", payload=None, attempt=1, max_attempts=1, created_at=datetime.now(UTC))
    with pytest.raises(Unsupported, match="no worker"):
        alone.then("second", None)
    storage = MemoryStorage()
    await storage.enqueue([job("claimed")])
    [claim] = await storage.claim("w", leases={"*": LEASE}, limit=1)
    attempt = Attempt(claim, "default", lambda claim, progress: None)
    with pytest.raises(Unsupported, match="no worker"):
        attempt.then(FollowUp(id="x", name="x", payload=None))


async def test_an_attempt_that_is_repeated_names_the_same_job() -> None:
    """The default id is one for all attempts of a job, and another one for each generation."""
    ids: list[str] = []

    async def work(job: Job) -> None:
        if job.name == "first":
            ids.append(job.then("second", None))
            if job.attempt == 1:
                raise ValueError("once more")

    storage = MemoryStorage()
    queue = Queue(storage)
    queue.execute(work)
    async with queue:
        for _ in range(2):
            await queue.enqueue(1, id="first", name="first")
            while (found := await queue.get_status("first")) is None or not found.state.is_final:
                await queue.manage.promote(["first"])
                await asyncio.sleep(0)
            await queue.manage.remove(["first"])
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert ids[0] != ids[2]


async def test_a_handler_s_own_transaction_lets_a_job_follow(tmp_path: Path) -> None:
    """The follow-up is committed with the handler's writes and the completion."""

    async def work(job: Job) -> None:
        if job.name == "first":
            async with job.transaction() as session:
                await session.execute(text("CREATE TABLE mine (id INTEGER)"))
                job.then("second", None, id="next")

    storage = SqlStorage(f"sqlite:///{tmp_path}/q.db")
    await storage.migrate()
    queue = Queue(storage)
    queue.execute(work)
    async with queue:
        await queue.enqueue(1, id="first", name="first")
        await queue.wait_for_job_chain_completion("first")
        await queue.wait_for_job_chain_completion("next")


CHILD = """
import asyncio, sys
from datetime import timedelta
from workers.jobs import JobRef, Completed
from workers.storage.file import FileStorage
from workers.storage.sql import SqlStorage

async def main(url):
    storage = SqlStorage(url) if url.startswith("sqlite") else FileStorage(url)
    await storage.connect()
    claims = await storage.claim("w", leases={"*": timedelta(milliseconds=1)}, limit=40)
    print("claimed", flush=True)
    for held in claims:
        await storage.settle([Completed(claim=held, result=b"1")])
        print(held.job_id, flush=True)
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["sqlite", "file"])
async def test_a_kill_between_the_ends_strands_nobody(tmp_path: Path, kind: str) -> None:
    """Whenever the process that ends the dependencies is killed, what it ended has released, and the rest goes on."""
    url = f"sqlite:///{tmp_path}/q.db" if kind == "sqlite" else str(tmp_path)
    queue = Queue(SqlStorage(url) if kind == "sqlite" else FileStorage(url))
    if isinstance(queue.storage, SqlStorage):
        await queue.storage.migrate()
    names = [str(number) for number in range(40)]
    await queue.enqueue_many([JobSpec(payload=1, id=name) for name in names])
    await queue.enqueue_many([JobSpec(payload=1, id=f"{name}-after", after=[name]) for name in names])
    await queue.enqueue(1, id="all", after=names)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, url, stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    assert child.stdout is not None
    for _ in range(12):
        await child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    await child.wait()
    found = await queue.storage.status(names)
    ended = {one.id for one in found if one is not None and one.state is JobState.COMPLETED}
    assert len(ended) >= 10
    after = await queue.storage.status([f"{name}-after" for name in names])
    released = {name for name, found in zip(names, after, strict=True) if found and found.state is JobState.QUEUED}
    assert released == ended
    while len((await queue.storage.recover(100)).requeued) or (await queue.counts())[JobState.PROCESSING]:
        await asyncio.sleep(0.01)
    while claims := await queue.storage.claim("w", leases={"*": LEASE}, limit=100):
        await queue.storage.settle([Completed(claim=held, result=b"1") for held in claims])
    assert (await queue.counts())[JobState.COMPLETED] == 2 * len(names) + 1
    await queue.stop()
