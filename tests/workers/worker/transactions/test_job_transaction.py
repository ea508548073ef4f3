"""Handlers that end their job in the transaction of their own writes, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from tests import warm
from tests.workers.running import AT_ONCE, Recorder, outcome, running
from tests.workers.storage.sql.steps import connected
from tests.workers.worker.transactions.ledgers import ledger, worked, write
from tests.workers.worker.transactions.transaction_child import LEASE
from workers import WorkerOptions
from workers.chains import continue_with
from workers.errors import LeaseLost, LossReason, TransactionError
from workers.jobs import Claim, Completed, JobOutcome, JobState, NewJob, OutcomeKind, Renewal
from workers.storage.sql import SqlStorage
from workers.testing.steps import PATIENCE, job, until
from workers.worker import Worker
from workers.worker.attempt import Attempt, Phase
from workers.worker.events import WorkerEventKind
from workers.worker.handlers import Job, SignalReason
from workers.worker.transactions import OwnTransaction


async def test_writes_and_completion_are_one(storage: SqlStorage, url: str) -> None:
    """The row and the result are there, whatever the handler returns, and the worker says that the job completed."""

    async def handler(job: Job) -> str:
        async with job.transaction() as session:
            await write(session, "row")
            job.complete({"is": "done"})
            assert (await storage.status([job.id]))[0].state is JobState.PROCESSING  # type: ignore[union-attr]  # there
            assert ledger(url) == []
        return "ignored"

    async with worked(storage, handler) as recorder:
        assert await outcome(storage, "job") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b'{"is":"done"}')
        await recorder.seen(WorkerEventKind.DRAINED)
    assert ledger(url) == ["row"]
    assert recorder.story("job") == [WorkerEventKind.ACTIVE, WorkerEventKind.COMPLETED]


async def test_writes_and_continuation_are_one(storage: SqlStorage, url: str) -> None:
    """The next link runs after the row is there; a transaction that says nothing completes the job with None."""

    async def handler(job: Job) -> None:
        async with job.transaction() as session:
            await write(session, f"{job.name} {job.payload}")
            if job.name == "work":
                job.complete(continue_with("second", 2))

    async with worked(storage, handler) as recorder:
        assert await outcome(storage, "job") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"null")
        await recorder.seen(WorkerEventKind.COMPLETED)
    assert ledger(url) == ["second 2", "work 1"]
    assert WorkerEventKind.CONTINUED in recorder.story("job")


async def test_a_block_that_raises_has_written_nothing(storage: SqlStorage, url: str) -> None:
    """The exception is a failure as any other, and the next attempt may begin its transaction again."""

    async def handler(job: Job) -> None:
        async with job.transaction() as session:
            await write(session, f"attempt {job.attempt}")
            job.complete("done")
            if job.attempt == 1:
                raise ValueError("no")

    recorder = Recorder()
    await storage.enqueue([job("job")])
    async with running(Worker(storage, {"*": handler}, observers=[recorder], options=WorkerOptions(retry=AT_ONCE))):
        assert (await outcome(storage, "job")).result == b'"done"'
        await recorder.seen(WorkerEventKind.COMPLETED)
    assert ledger(url) == ["attempt 2"]
    assert len(recorder.of(WorkerEventKind.FAILING)) == 1


async def test_what_is_enqueued_in_the_block_shares_its_fate(storage: SqlStorage) -> None:
    """Another job comes into the queue with the end of this one."""

    async def handler(job: Job) -> None:
        if job.id == "job":
            async with job.transaction() as session:
                await storage.enqueue([NewJob(id="other", name="other", payload=b"1")], connection=session)
                assert await storage.status(["other"]) == [None]

    async with worked(storage, handler):
        assert (await outcome(storage, "other")).kind is OutcomeKind.COMPLETED


async def test_a_lost_claim_takes_the_writes_with_it(storage: SqlStorage, url: str) -> None:
    """Whose job was ended by somebody else learns so at the end of the block, and has written nothing."""
    await storage.enqueue([job("job")])
    [claim] = await storage.claim("worker", leases={"*": LEASE}, limit=1)
    await storage.complete("job", b"outside")
    own = own_transaction(storage, claim)
    with pytest.raises(LeaseLost) as lost:
        async with own.begin() as session:
            await write(session, "row")
    assert lost.value.reason is LossReason.COMPLETED
    assert ledger(url) == []
    assert (own.settled, own.beyond_recall) == (None, False)
    assert (await outcome(storage, "job")).result == b"outside"


async def test_a_transaction_ended_inside_the_block_ends_no_job(storage: SqlStorage, url: str) -> None:
    """What the handler committed by itself is its own affair; the job is not ended by what comes after."""
    await storage.enqueue([job("job")])
    [claim] = await storage.claim("worker", leases={"*": LEASE}, limit=1)

    async def end_it_twice() -> None:
        async with own_transaction(storage, claim).begin() as session:
            await write(session, "first")
            await session.commit()
            await write(session, "second")

    with pytest.raises(TransactionError, match="inside the block"):
        await end_it_twice()
    assert ledger(url) == ["first"]
    assert [status and status.state for status in await storage.status(["job"])] == [JobState.PROCESSING]


async def test_a_commit_under_way_comes_to_its_end(url: str) -> None:
    """A lease that is lost by it disturbs nothing; a shutdown is passed on when the commit's answer is there."""
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with connected(SqlStorage(engine)) as storage:
        await storage.enqueue([job("job")])
        [claim] = await storage.claim("worker", leases={"*": LEASE}, limit=1)
        own = own_transaction(storage, claim)
        task = asyncio.create_task(written(own, "row"))
        attempt = Attempt(claim, "default", no_report, lambda _: own, phase=Phase.RUNNING, task=task, own=own)
        interrupted = []

        def interrupt(_: Connection) -> None:
            interrupted.extend(map(attempt.interrupt, (SignalReason.LEASE_LOST, SignalReason.SHUTDOWN)))

        event.listen(engine.sync_engine, "commit", interrupt)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert own.settled is not None
        assert (await outcome(storage, "job")).result == b"inside"
    await engine.dispose()
    assert interrupted == [False, True]
    assert ledger(url) == ["row"]


async def test_after_the_commit_the_handler_is_left_alone(storage: SqlStorage, url: str) -> None:
    """Renewals find the lease gone, which is as it should be: what the handler does afterwards is not cancelled."""
    renewed = asyncio.Event()
    committed = False

    class Watched(SqlStorage):
        async def renew(self, claims: Sequence[Claim]) -> Renewal:
            renewal = await super().renew(claims)
            if committed and renewal.lost:
                renewed.set()
            return renewal

    async def handler(job: Job) -> None:
        nonlocal committed
        async with job.transaction():
            job.complete("done")
            committed = True  # here: a renewal may learn of the commit before this task does
        await renewed.wait()
        await asyncio.sleep(0)
        raise ValueError("too late to matter")

    async with connected(Watched(url)) as watched, worked(watched, handler, lease=timedelta(seconds=3)) as seen:
        completed = await seen.seen(WorkerEventKind.COMPLETED)
    assert isinstance(completed.error, ValueError)
    assert seen.story("job") == [WorkerEventKind.ACTIVE, WorkerEventKind.COMPLETED]


async def test_misuse_is_told_at_the_call(storage: SqlStorage, url: str) -> None:
    """Ending a job outside of its transaction or twice, and progress that nobody could be told, raise there."""

    async def handler(job: Job) -> None:
        with pytest.raises(RuntimeError, match="belongs inside"):
            job.complete()
        job.progress(1)
        async with job.transaction() as session:
            await write(session, "row")
            with pytest.raises(TransactionError, match="progress"):
                job.progress(2)
            with pytest.raises(RuntimeError, match="one transaction"):
                async with job.transaction():
                    pytest.fail("a second one")
            job.complete(1)
            with pytest.raises(RuntimeError, match="ends once"):
                job.complete(2)
        with pytest.raises(RuntimeError, match="one transaction"):
            async with job.transaction():
                pytest.fail("another one")

    async with worked(storage, handler) as recorder:
        completed = await recorder.seen(WorkerEventKind.COMPLETED)
    assert completed.error is None
    assert [status and status.encoded_progress for status in await storage.status(["job"])] == [b"1"]


async def test_many_handlers_take_turns(storage: SqlStorage, url: str) -> None:
    """Jobs that run side by side each have their row, once; none waits for another for ever."""

    async def handler(job: Job) -> None:
        async with job.transaction() as session:
            await write(session, job.id)
            await asyncio.sleep(0)

    async with worked(storage, handler, jobs=40) as recorder:
        await recorder.seen(WorkerEventKind.COMPLETED, 40)
    assert len(ledger(url)) == len(set(ledger(url))) == 40


async def test_a_given_engine_makes_the_sessions(url: str) -> None:
    """The application's own asyncio engine is used, and left open."""
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    used = None

    async def handler(job: Job) -> None:
        nonlocal used
        async with job.transaction() as session:
            await write(session, "row")
            used = session.bind

    async with connected(SqlStorage(engine)) as storage, worked(storage, handler):
        await outcome(storage, "job")
    assert used is engine
    async with engine.connect() as connection:
        assert (await connection.execute(text("SELECT what FROM ledger"))).scalars().all() == ["row"]
    await engine.dispose()


async def test_a_killed_handler_did_all_or_nothing(url: str) -> None:
    """Killed between any two statements of its transaction: row, other job and next link are all there, or none is."""
    process = await asyncio.create_subprocess_exec(
        warm.PYTHON, "-m", "tests.workers.worker.transactions.transaction_child", url, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    stages = [*output.decode().split(), "after"]
    fates = [await fate(url, f"kill-{number}") for number in range(1, len(stages) + 1)]
    due = {"before": {"nothing"}, "amid": {"nothing", "all"}, "after": {"all"}}
    assert [each for each in zip(stages, fates, strict=True) if each[1] not in due[each[0]]] == []
    assert fates[:8] == ["nothing"] * 8
    assert fates[-2:] == ["all", "all"]


async def fate(url: str, queue: str) -> str:
    """What a killed process left of its job; `nothing` but a job that is recovered and runs again, or `all`."""
    async with connected(SqlStorage(url, queue)) as storage:
        found, side = await storage.status(["job", "side"])
        assert found is not None
        if found.chain_index:
            assert (ledger(url, queue), found.name, found.state) == (["one", "two"], "second", JobState.QUEUED)
            assert side is not None
            return "all"
        assert (ledger(url, queue), found.name, side) == ([], "first", None)

        async def is_back() -> bool:
            return bool((await storage.recover(10)).requeued)

        await until(is_back)
        [again] = await storage.claim("other", leases={"*": LEASE}, limit=10)
        assert (again.payload, again.attempt) == (b"1", 2)
        return "nothing"


@pytest.mark.parametrize("own", [True, False], ids=["own engine", "given engine"])
async def test_a_handler_cancelled_in_a_statement_leaves_no_lock(
    url: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had written is undone at once, its job released, and the next transaction begins."""
    monkeypatch.setattr("workers.worker.worker.FORCED_STOP_SECONDS", 2 * PATIENCE)  # of a driver that cannot interrupt
    begun = asyncio.Event()
    long = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500000) SELECT count(*) FROM n"

    async def handler(job: Job) -> None:
        async with job.transaction() as session:
            await write(session, "row")
            begun.set()
            await session.execute(text(long))
            await asyncio.Event().wait()

    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with connected(SqlStorage(url if own else engine)) as storage:
        async with worked(storage, handler) as recorder, asyncio.timeout(PATIENCE):
            await begun.wait()
        assert recorder.of(WorkerEventKind.RELEASED)
        async with storage.session() as session:
            await write(session, "next")
            await session.commit()
    await engine.dispose()
    assert ledger(url) == ["next"]


def own_transaction(storage: SqlStorage, claim: Claim) -> OwnTransaction:
    async def flush(_: Claim) -> None:
        return None

    return OwnTransaction(storage, claim, success=lambda _: Completed(claim=claim, result=b"inside"), flush=flush)


def no_report(_: Claim, _progress: bytes) -> None:
    raise AssertionError("nothing reports")


async def written(own: OwnTransaction, what: str) -> None:
    async with own.begin() as session:
        await write(session, what)
