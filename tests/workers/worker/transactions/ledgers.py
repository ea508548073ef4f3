"""The application's own table, and handlers that write to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession

from tests.workers.running import NEVER, Recorder, running
from tests.workers.worker.transactions.transaction_child import LEASE
from workers import WorkerOptions
from workers.storage.base import Storage
from workers.testing.steps import job
from workers.worker import Worker
from workers.worker.handlers import Job

WRITE = text("INSERT INTO ledger (queue, what) VALUES (:queue, :what)")


async def write(session: AsyncSession, what: str, queue: str = "default") -> None:
    await session.execute(WRITE, {"queue": queue, "what": what})


def ledger(url: str, queue: str = "default") -> list[str]:
    """What the application's table says."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT what FROM ledger WHERE queue = :queue"), {"queue": queue})
        rows = sorted(found.scalars())
    engine.dispose()
    return rows


@asynccontextmanager
async def worked(
    storage: Storage, handler: Callable[[Job], Awaitable[object]], *, jobs: int = 1, lease: timedelta = LEASE
) -> AsyncIterator[Recorder]:
    """A worker with this handler for every name runs, on as many jobs."""
    recorder = Recorder()
    await storage.enqueue([job(f"job-{number}" if number else "job", payload=b"1") for number in range(jobs)])
    async with running(
        Worker(storage, {"*": handler}, lease=lease, observers=[recorder], options=WorkerOptions(retry=NEVER))
    ):
        yield recorder
