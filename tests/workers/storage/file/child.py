"""A second process on the same directory: `python -m tests.workers.storage.file.child VERB DIRECTORY`."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

from workers.errors import WorkersError
from workers.jobs import Completed, CronRow, NewJob
from workers.storage.file import FileStorage

MINUTE = timedelta(minutes=1)


def say(*words: object) -> None:
    print(*words, flush=True)


async def told() -> None:
    """The parent wrote a line."""
    await asyncio.to_thread(sys.stdin.readline)


async def complete(storage: FileStorage) -> None:
    """Every job there is, as soon as the parent says so."""
    say("ready")
    await told()
    for claim in await storage.claim("child", leases={"*": MINUTE}, limit=100):
        await storage.settle([Completed(claim=claim, result=b"from the child")])


async def enqueue(storage: FileStorage) -> None:
    """One job, as soon as the parent says so."""
    say("ready")
    await told()
    await storage.enqueue([NewJob(id="from the child", name="work", payload=b"{}")])


async def race(storage: FileStorage) -> None:
    """Claims until nothing is left; prints what it got."""
    say("ready")
    await told()
    while claims := await storage.claim("child", leases={"*": MINUTE}, limit=7):
        print("\n".join(claim.job_id for claim in claims), flush=True)


async def fill(storage: FileStorage) -> None:
    """Enqueues while files may not grow beyond 100 000 bytes; prints what worked, then works on without the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    failed = 0
    for number in range(30):
        jobs = [NewJob(id=f"{number}-{part}", name="work", payload=b"x" * 3_000) for part in range(3)]
        try:
            await storage.enqueue(jobs)
        except WorkersError as error:
            failed += 1
            say("failed", type(error).__name__, error)
        else:
            say("enqueued", number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await storage.enqueue([NewJob(id="after", name="work", payload=b"")])
    say("waiting", sum((await storage.counts()).values()))


async def tick(storage: FileStorage) -> None:
    """Ticks a cron from revision to revision, each with a job of its own; prints what ticked, until it is killed."""
    rows = (await storage.crons()).rows
    revision = rows[0].revision if rows else 0
    while True:
        revision += 1
        row = CronRow(name="cron", revision=revision, due=None, body=f"body {revision}")
        assert await storage.replace_cron(row, jobs=[NewJob(id=f"tick-{revision}", name="work", payload=b"{}")])
        say(revision)


async def start(storage: FileStorage) -> None:
    """Starts limited jobs and fair ones, one after the other; prints their ids, until it is killed."""
    while True:
        for claim in await storage.claim("child", leases={"*": MINUTE}, limit=1):
            say(claim.job_id)


VERBS: dict[str, Callable[[FileStorage], Awaitable[None]]] = {
    verb.__name__: verb for verb in (complete, enqueue, race, fill, tick, start)
}


async def main(verb: str, directory: str) -> None:
    storage = FileStorage(Path(directory))
    await storage.connect()
    await VERBS[verb](storage)
    await storage.disconnect()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
