"""Queues that nobody has used before a caller's transaction, which has written already, brings them a job."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from tests.workers.running import outcome
from tests.workers.storage.sql.steps import change, connected, on_sqlite
from tests.workers.worker.transactions.ledgers import worked
from workers import JobSpec, Queue, QueueOptions
from workers.errors import JobGoneError, TransactionError
from workers.jobs import JobOutcome, JobState, OutcomeKind
from workers.limits import Limit, LimitKey
from workers.storage.sql import SqlStorage
from workers.sync import SyncQueue
from workers.testing.steps import job, until
from workers.worker.handlers import Job

TWO = {"send": Limit(concurrency=2)}
THREE = {"send": Limit(concurrency=3)}


@pytest.fixture
def impatient(url: str, outsider: Engine) -> Callable[[str], SqlStorage]:
    """Storages that would soon give up waiting for a transaction, beside a table of the application."""
    change(outsider, "CREATE TABLE orders (id INTEGER)")
    return lambda name: SqlStorage(url, name, busy_timeout=timedelta(milliseconds=200))


@asynccontextmanager
async def has_written(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """A transaction of the application's with an order in it."""
    async with AsyncSession(engine) as session:
        await session.execute(text("INSERT INTO orders VALUES (1)"))
        yield session


@asynccontextmanager
async def used(storage: SqlStorage, **options: dict[str, Limit]) -> AsyncIterator[Queue]:
    """A queue that connects when it has to."""
    queue = Queue(storage, options=QueueOptions(limits=options.get("limits", {})))
    try:
        yield queue
    finally:
        await queue.stop()


@pytest.mark.parametrize("limits", [{}, TWO], ids=["plain", "limited"])
@pytest.mark.parametrize("kind", [AsyncSession, AsyncConnection])
async def test_the_first_job_of_a_queue_goes_over_the_callers_connection(
    impatient: Callable[[str], SqlStorage],
    engine: AsyncEngine,
    kind: type[AsyncSession] | type[AsyncConnection],
    limits: dict[str, Limit],
) -> None:
    """A new queue, its limits and its first job are committed with what the caller has written before."""
    async with used(impatient("mail"), limits=limits) as queue:
        async with kind(engine) as connection:
            await connection.execute(text("INSERT INTO orders VALUES (1)"))
            await queue.enqueue(1, id="a", name="send", connection=connection)
            await queue.enqueue(2, id="b", name="send", connection=connection)
            await connection.commit()
        assert (await queue.counts())[JobState.QUEUED] == 2
        assert await queue.manage.limits() == limits


@pytest.mark.parametrize("kind", ["Session", "Connection"])
def test_so_it_does_in_plain_code(impatient: Callable[[str], SqlStorage], sync_engine: Engine, kind: str) -> None:
    """A synchronous connection carries the queue, too."""
    with SyncQueue(impatient("mail")) as queue:
        with Session(sync_engine) if kind == "Session" else sync_engine.connect() as connection:
            connection.execute(text("INSERT INTO orders VALUES (1)"))
            queue.enqueue(1, connection=connection)
            connection.commit()
        assert queue.counts()[JobState.QUEUED] == 1


async def test_plain_code_declares_the_limits(impatient: Callable[[str], SqlStorage], sync_engine: Engine) -> None:
    """`enqueue_on` brings the limits of the queue along."""
    async with used(impatient("mail"), limits=TWO) as queue:
        with Session(sync_engine) as session:
            session.execute(text("INSERT INTO orders VALUES (1)"))
            queue.enqueue_on(session, [JobSpec(payload=1, name="send", limit_key=LimitKey("send", "bob"))])
            session.commit()
        async with connected(impatient("mail")) as storage:
            assert await storage.declared_limits() == TWO


async def test_what_is_rolled_back_is_written_again(
    impatient: Callable[[str], SqlStorage], engine: AsyncEngine
) -> None:
    """A rollback takes the queue and its limits with it, and the next transaction brings both."""
    async with used(impatient("mail"), limits=TWO) as queue:
        for commits in (False, True):
            async with has_written(engine) as session:
                for at in range(2):
                    await queue.enqueue(at, name="send", connection=session)
                await (session.commit() if commits else session.rollback())
        async with connected(impatient("mail")) as storage:
            assert (await storage.counts())[JobState.QUEUED] == 2
            assert await storage.declared_limits() == TWO


async def test_limits_are_declared_once(impatient: Callable[[str], SqlStorage], engine: AsyncEngine) -> None:
    """What somebody else has declared since stays, whichever way the queue's own limits came there."""
    async with connected(impatient("mail")) as other:
        for is_connected in (False, True):
            async with used(impatient("mail"), limits=TWO) as queue:
                if is_connected:
                    await queue.counts()
                for at in range(3):
                    async with has_written(engine) as session:
                        await queue.enqueue(at, name="send", connection=session)
                        await session.commit()
                    if at == 1:
                        await other.declare_limits(THREE)
                assert await other.declared_limits() == THREE


async def test_chains_join_as_the_first_thing(impatient: Callable[[str], SqlStorage], engine: AsyncEngine) -> None:
    """What ends and removes chains goes over the caller's connection, too, and so does what tells of it."""
    async with used(impatient("mail")) as first, has_written(engine) as session:
        with pytest.raises(JobGoneError):
            await first.complete_job_chain("a", 1, connection=session)
    async with used(impatient("mail")) as second, has_written(engine) as session:
        assert await second.delete_job_chains(["a"], connection=session) == 0
    async with used(impatient("mail")) as third, has_written(engine) as session, third.with_notify(session):
        await third.start_job_chain("send", 1, connection=session)
        await session.commit()


async def test_a_handlers_transaction_brings_another_queue_its_first_job(
    impatient: Callable[[str], SqlStorage], engine: AsyncEngine
) -> None:
    """What a handler enqueues in `job.transaction()` need not have been used by its process."""
    async with connected(impatient("orders")) as storage, used(impatient("mail"), limits=TWO) as mail:

        async def handler(one: Job) -> None:
            async with one.transaction() as session:
                await session.execute(text("INSERT INTO orders VALUES (1)"))
                await mail.enqueue(1, name="send", connection=session)

        async with worked(storage, handler):
            assert await outcome(storage, "job") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"null")
        assert (await mail.counts())[JobState.QUEUED] == 1


@on_sqlite
async def test_a_new_queue_is_not_waited_for_in_the_own_transaction(
    impatient: Callable[[str], SqlStorage], engine: AsyncEngine
) -> None:
    """A call without `connection=` that would have to write the queue itself is refused at once, as other ones."""
    async with used(impatient("mail")) as queue, has_written(engine) as session:
        await queue.enqueue(1, connection=session)
        with pytest.raises(TransactionError, match="connection="):
            await queue.counts()


async def test_a_stop_closes_what_was_opened_for_callers(
    impatient: Callable[[str], SqlStorage], engine: AsyncEngine
) -> None:
    """A queue that has only joined transactions leaves no threads behind."""
    before = set(threading.enumerate())
    async with used(impatient("mail")) as queue, has_written(engine) as session:
        await queue.enqueue(1, connection=session)
        await session.commit()
        assert threads_since(before)
    await until(lambda: not threads_since(before))


async def test_a_stop_leaves_the_others_of_its_storage_alone(
    impatient: Callable[[str], SqlStorage], engine: AsyncEngine
) -> None:
    """A queue that has only joined transactions ends nothing that others have opened."""
    before = set(threading.enumerate())
    storage = impatient("mail")
    async with used(storage) as queue, has_written(engine) as session:
        await session.commit()
        await queue.counts()
        async with used(storage) as beside:
            await beside.enqueue(1, connection=session)
            await session.commit()
        await storage.enqueue([job("b")])
        assert (await queue.counts())[JobState.QUEUED] == 2
    await until(lambda: not threads_since(before))


def threads_since(before: set[threading.Thread]) -> list[threading.Thread]:
    """The threads of storages that were begun since."""
    return [each for each in threading.enumerate() if each not in before and each.name.startswith("workers-")]
