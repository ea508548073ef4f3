"""A handler's own transaction on SQLite, which admits one writer, and on storages that have none."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from tests.workers.storage.sql.steps import connected
from tests.workers.worker.transactions.ledgers import ledger, worked, write
from workers.errors import StorageUnavailable, TransactionError, Unsupported
from workers.jobs import NewJob
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.worker.events import WorkerEventKind
from workers.worker.handlers import Job
from workers.worker.transactions import Transactional

on_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@on_sqlite
async def test_a_step_beside_the_block_is_refused_on_sqlite(storage: SqlStorage, url: str) -> None:
    """What would wait for the handler's own write lock raises instead, and the block goes on."""

    async def handler(job: Job) -> None:
        async with job.transaction() as session:
            with pytest.raises(TransactionError, match="connection="):
                await storage.enqueue([NewJob(id="other", name="other", payload=b"1")])
            await write(session, "row")

    async with worked(storage, handler) as recorder:
        await recorder.seen(WorkerEventKind.COMPLETED)
    assert ledger(url) == ["row"]


@on_sqlite
async def test_a_lock_held_too_long_is_unavailable(url: str) -> None:
    """A transaction that cannot begin on SQLite says so after the storage's patience, and blocks no loop."""
    async with connected(SqlStorage(url, busy_timeout=timedelta(milliseconds=100))) as storage:
        async with storage.session(), connected(SqlStorage(url)) as other:
            sleeper = asyncio.create_task(_open(storage))
            with pytest.raises(StorageUnavailable):
                await sleeper
            assert await other.status(["job"]) == [None]
        async with storage.session() as session:
            await write(session, "row")
            await session.commit()
    assert ledger(url) == ["row"]


@on_sqlite
async def test_storages_without_transactions_say_so(url: str) -> None:
    """The memory storage has none: the handler learns it at the block, and its job is a failed attempt."""
    storage = MemoryStorage()
    assert not isinstance(storage, Transactional)
    assert isinstance(SqlStorage(url), Transactional)

    async def handler(job: Job) -> None:
        async with job.transaction():
            pytest.fail("a transaction")

    async with worked(storage, handler) as recorder:
        failing = await recorder.seen(WorkerEventKind.FAILING)
    assert isinstance(failing.error, Unsupported)
    assert failing.claim is not None
    bare = Job(id="a", name="n", payload=None, attempt=1, max_attempts=1, created_at=failing.claim.created_at)
    with pytest.raises(Unsupported):
        bare.transaction()


async def _open(storage: SqlStorage) -> None:
    async with storage.session():
        pytest.fail("two transactions at once")
