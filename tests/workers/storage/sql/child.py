"""A second process on the same database: `python -m tests.workers.storage.sql.child VERB URL ARGUMENT`."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta

from tests.patience import until
from tests.workers.storage.sql.steps import watcher_of
from workers.jobs import Completed, NewJob
from workers.storage.sql import SqlStorage

MINUTE = timedelta(minutes=1)


async def enqueue(storage: SqlStorage, job_id: str) -> None:
    """One job, as soon as the parent says so."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await storage.enqueue([NewJob(id=job_id, name="work", payload=b"{}")])


async def wait_without_descriptors(storage: SqlStorage, _: str) -> None:
    """Waits for a job in a process that may open nothing more, then in one that may again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await storage.counts()
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    listening = asyncio.to_thread(sys.stdin.readline)
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    await until(lambda: watcher_of(storage)._watched_until)
    assert watcher_of(storage)._ear is None
    print("ready", flush=True)
    await listening
    await waiting
    print("heard", flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    async with storage.cancel_requests():
        await until(lambda: watcher_of(storage)._ear is not None)
    print("listens", flush=True)


async def complete(storage: SqlStorage, _: str) -> None:
    """Every job there is, as soon as the parent says so."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for claim in await storage.claim("child", leases={"*": MINUTE}, limit=100):
        await storage.settle([Completed(claim=claim, result=b"from the child")])


async def cancel(storage: SqlStorage, job_id: str) -> None:
    """The job is cancelled, as soon as the parent says so."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await storage.cancel(job_id)


async def race(storage: SqlStorage, _: str) -> None:
    """Claims until nothing is left; prints what it got."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    while claims := await storage.claim("child", leases={"*": MINUTE}, limit=7):
        print("\n".join(claim.job_id for claim in claims), flush=True)


async def migrate(storage: SqlStorage, _: str) -> None:
    """Only the migration itself, as soon as the parent says so."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await storage.migrate()


VERBS: dict[str, Callable[[SqlStorage, str], Awaitable[None]]] = {
    "enqueue": enqueue,
    "wait_without_descriptors": wait_without_descriptors,
    "complete": complete,
    "cancel": cancel,
    "race": race,
}


async def main(verb: str, url: str, argument: str) -> None:
    storage = SqlStorage(url)
    if verb == "migrate":
        await migrate(storage, argument)
        return
    await storage.connect()
    await VERBS[verb](storage, argument)
    await storage.disconnect()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
