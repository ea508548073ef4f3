"""Steps that end jobs in the caller's own transaction, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from tests.workers.storage.sql.steps import MINUTE, claim_all, ids, on_postgres, on_sqlite
from workers.errors import StorageError, TransactionError
from workers.jobs import Claim, Completed, Continued, JobEventKind, JobState, NewJob, SettleStatus
from workers.storage.sql import SqlStorage
from workers.testing.steps import PATIENCE, job, state

Ending: TypeAlias = Callable[[SqlStorage, Claim, AsyncSession], Awaitable[object]]


async def claimed(storage: SqlStorage, *jobs: NewJob) -> list[Claim]:
    """The jobs, enqueued and running."""
    await storage.enqueue(jobs)
    return await claim_all(storage)


async def complete_it(storage: SqlStorage, claim: Claim, session: AsyncSession) -> None:
    [outcome] = await storage.settle([Completed(claim=claim, result=b"in")], connection=session)
    assert outcome.status is SettleStatus.APPLIED


async def continue_it(storage: SqlStorage, claim: Claim, session: AsyncSession) -> None:
    step = Continued(claim=claim, then=job(claim.job_id, chain_index=1))
    outcomes = [(await storage.settle([step], connection=session))[0].status for _ in range(2)]
    assert outcomes == [SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED]


async def complete_from_outside(storage: SqlStorage, claim: Claim, session: AsyncSession) -> None:
    assert await storage.complete(claim.job_id, b"out", connection=session) is JobState.PROCESSING


async def remove_it(storage: SqlStorage, claim: Claim, session: AsyncSession) -> None:
    assert await storage.remove([claim.job_id], running=True, connection=session) == 1


ENDINGS = {
    "completed": (complete_it, JobState.COMPLETED, JobEventKind.COMPLETED),
    "continued": (continue_it, JobState.QUEUED, JobEventKind.QUEUED),
    "completed from outside": (complete_from_outside, JobState.COMPLETED, JobEventKind.CANCEL_REQUESTED),
    "removed": (remove_it, None, JobEventKind.CANCEL_REQUESTED),
}
endings = pytest.mark.parametrize(("end", "then", "told"), ENDINGS.values(), ids=ENDINGS.keys())


@endings
async def test_an_ending_holds_with_the_commit(
    storage: SqlStorage, engine: AsyncEngine, end: Ending, then: JobState | None, told: JobEventKind
) -> None:
    """Nobody sees it before, and subscribers are not told; everybody does afterwards."""
    [claim] = await claimed(storage, job("a"))
    async with storage.events() as events, AsyncSession(engine) as session:
        await end(storage, claim, session)
        assert await state(storage, "a") is JobState.PROCESSING
        hearing = asyncio.create_task(events.get())
        await storage.counts()
        assert not hearing.done()
        await session.commit()
        async with asyncio.timeout(PATIENCE):
            assert (await hearing).kind is told
    assert await state(storage, "a") is then


@endings
async def test_an_ending_vanishes_with_the_rollback(
    storage: SqlStorage, engine: AsyncEngine, end: Ending, then: JobState | None, told: JobEventKind
) -> None:
    """The claim holds its job as if nothing had been, and the first that subscribers hear is what comes next."""
    [claim] = await claimed(storage, job("a"))
    async with storage.events() as events:
        async with AsyncSession(engine) as session:
            await end(storage, claim, session)
            await session.rollback()
        assert (await storage.renew([claim])).lost == {}
        await storage.settle([Completed(claim=claim, result=b"later")])
        async with asyncio.timeout(PATIENCE):
            assert (await events.get()).kind is JobEventKind.COMPLETED
    assert (await storage.result("a")).result == b"later"  # type: ignore[union-attr]  # it ended


async def test_a_continuation_wakes_waiters_with_the_commit(storage: SqlStorage, engine: AsyncEngine) -> None:
    """A worker that waits for work takes the next link when it is there, and not before."""
    [claim] = await claimed(storage, job("a"))
    async with AsyncSession(engine) as session:
        await continue_it(storage, claim, session)
        waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
        assert (await storage.counts())[JobState.QUEUED] == 0
        assert not waiting.done()
        await session.commit()
        async with asyncio.timeout(PATIENCE):
            await waiting
    assert [held.chain_index for held in await claim_all(storage)] == [1]


async def test_a_settlement_goes_to_no_other_database(storage: SqlStorage, tmp_path: Path) -> None:
    """A connection of another database is refused before anything happens."""
    [claim] = await claimed(storage, job("a"))
    other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
    async with other.connect() as connection:
        with pytest.raises(StorageError, match="another database"):
            await storage.settle([Completed(claim=claim, result=b"")], connection=connection)
        with pytest.raises(StorageError, match="another database"):
            await storage.remove(["a"], running=True, connection=connection)
    await other.dispose()
    with pytest.raises(TypeError, match="connection must be"):
        await storage.complete("a", b"", connection="nonsense")
    assert await state(storage, "a") is JobState.PROCESSING


@on_sqlite
async def test_writing_beside_a_settlement_is_refused_at_once(storage: SqlStorage, engine: AsyncEngine) -> None:
    """The settlement's transaction holds the write lock, so that another step of this task could only wait for it."""
    one, other = await claimed(storage, job("a"), job("b"))
    async with AsyncSession(engine) as session:
        await complete_it(storage, one, session)
        with pytest.raises(TransactionError, match="connection="):
            await storage.settle([Completed(claim=other, result=b"")])
        with pytest.raises(TransactionError, match="connection="):
            await storage.complete("b", b"")
        await complete_it(storage, other, session)
        await session.commit()
    assert (await storage.counts())[JobState.COMPLETED] == 2


@on_postgres
@pytest.mark.parametrize("end", [complete_it, complete_from_outside, remove_it])
async def test_claims_pass_over_what_a_transaction_ends(storage: SqlStorage, engine: AsyncEngine, end: Ending) -> None:
    """An open ending keeps its job's ordering key from being claimed, and nothing else; the commit frees it."""
    [claim] = await claimed(storage, job("a", ordering_key="key"))
    await storage.enqueue([job("b", ordering_key="key"), job("c")])
    async with AsyncSession(engine) as session, asyncio.timeout(PATIENCE):
        await end(storage, claim, session)
        assert await ids(storage) == ["c"]
        await session.commit()
    assert await ids(storage) == ["b"]


@on_postgres
@endings
async def test_who_subscribes_before_the_commit_is_told(
    storage: SqlStorage, engine: AsyncEngine, end: Ending, then: JobState | None, told: JobEventKind
) -> None:
    """However long the transaction was open by then; and nobody waits for it to subscribe."""
    [claim] = await claimed(storage, job("a"))
    async with AsyncSession(engine) as session, asyncio.timeout(PATIENCE):
        await end(storage, claim, session)
        async with storage.events() as events:
            await session.commit()
            assert (await events.get()).kind is told


# Being told of what bare connections committed


@asynccontextmanager
async def a_waiter(storage: SqlStorage) -> AsyncIterator[asyncio.Task[None]]:
    """Somebody waits for work, and has it when the block ends."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    yield waiting
    async with asyncio.timeout(PATIENCE):
        await waiting


@pytest.mark.parametrize("commit_inside", [True, False], ids=["committed inside", "committed after"])
@on_sqlite
@pytest.mark.usefixtures("no_watcher")
async def test_a_bare_commit_is_told_at_once(storage: SqlStorage, engine: AsyncEngine, commit_inside: bool) -> None:
    """With `with_notify` a bare connection's jobs need no watcher to be noticed, and are not told of before."""
    async with a_waiter(storage) as waiting, AsyncConnection(engine) as connection:
        async with storage.with_notify(connection):
            await storage.enqueue([job("a")], connection=connection)
            for _ in range(2):  # the watcher, which has looked once before it pauses, has done so
                await storage.counts()
            assert not waiting.done()
            if commit_inside:
                await connection.commit()
        if not commit_inside:
            await storage.counts()
            assert not waiting.done()
            await connection.commit()


@on_sqlite
@pytest.mark.usefixtures("no_watcher")
async def test_a_block_that_raises_tells_of_its_commit(storage: SqlStorage, engine: AsyncEngine) -> None:
    """What was committed before the error is noticed at once, and the error goes on."""

    async def commit_and_raise(connection: AsyncConnection) -> None:
        async with storage.with_notify(connection):
            await storage.enqueue([job("a")], connection=connection)
            for _ in range(2):  # the watcher, which has looked once before it pauses, has done so
                await storage.counts()
            await connection.commit()
            raise ZeroDivisionError

    async with a_waiter(storage), AsyncConnection(engine) as connection:
        with pytest.raises(ZeroDivisionError):
            await commit_and_raise(connection)


async def test_with_notify_takes_sessions_too(storage: SqlStorage, engine: AsyncEngine) -> None:
    """They tell of their commit by themselves, with it and without it; what is no connection is refused."""
    async with a_waiter(storage), AsyncSession(engine) as session, storage.with_notify(session):
        await storage.enqueue([job("a")], connection=session)
        await session.commit()
    with pytest.raises(TypeError, match="connection must be"):
        async with storage.with_notify("nonsense"):
            pass
