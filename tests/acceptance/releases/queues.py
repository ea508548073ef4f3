"""Queues as a release leaves them on each storage: how one is filled, kept as a text, and put back.

    python -m tests.acceptance.releases.queues VERSION

Writes `queue-VERSION-KIND.txt` beside this file for each kind, by the code of this checkout. A file is made anew until
its version is released, and never after that.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import psycopg
from redis import Redis

from tests.servers import POSTGRES_PROGRAMS, postgres, valkey
from workers import Job, JobFailedError, JobSpec, Queue, QueueOptions, UnrecoverableError
from workers.storage import open_storage

QUEUE: Final = "released"
WAITING: Final = ("first", "second", "third")
LONG: Final = timedelta(days=36_000)
"""Nothing in a file is ever too old."""
PATIENCE: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kind of storage keeps things: the URL of the queue, and what is there, as a text, to be kept or put."""

    url: str
    keep: Callable[[], str]
    put: Callable[[str], None]


async def fill(url: str) -> None:
    """Leave jobs that wait, one that is done, one that failed for good, and one that is due in a century.

    Bull 1.x has no such times.
    """

    async def work(job: Job) -> str:
        if job.id == "refused":
            raise UnrecoverableError("as it should")
        return f"{job.payload} is done"

    options = QueueOptions(keep_failed=LONG)
    queue = Queue(open_storage(url, queue=QUEUE), max_attempts=3, result_ttl=LONG, options=options)
    await queue.migrate()
    queue.execute({"work": work})
    async with queue:
        await queue.enqueue_and_wait("this", name="work", id="done", timeout=PATIENCE)
        with suppress(JobFailedError):
            await queue.enqueue_and_wait("that", name="work", id="refused", timeout=PATIENCE)
    async with Queue(open_storage(url, queue=QUEUE), max_attempts=3, result_ttl=LONG, options=options) as producer:
        await producer.enqueue_many([JobSpec(name="work", payload=name, id=name) for name in WAITING])
        if not url.startswith("bull+"):
            await producer.enqueue("later", name="work", id="later", delay=LONG)


def sqlite_place(folder: Path) -> Place:
    file = folder / "queue.sqlite3"

    def keep() -> str:
        with closing(sqlite3.connect(file)) as connection:
            return "\n".join(connection.iterdump())

    def put(text: str) -> None:
        with closing(sqlite3.connect(file)) as connection:
            connection.executescript(text)

    return Place(f"sqlite:///{file}", keep, put)


def file_place(folder: Path) -> Place:
    directory = folder / "queue"

    def keep() -> str:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:xz") as archive:
            archive.add(directory, ".")
        return base64.b64encode(packed.getvalue()).decode()

    def put(text: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text)), mode="r:xz") as archive:
            archive.extractall(directory, filter="data")

    return Place(f"file://{directory}", keep, put)


def postgres_place(url: str) -> Place:
    plain = url.replace("+psycopg", "")

    def keep() -> str:
        words = [str(POSTGRES_PROGRAMS / "pg_dump"), "--inserts", "--no-owner", "--no-privileges", plain]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        return "\n".join(line for line in lines if not line.startswith("\\"))  # words for psql

    def put(text: str) -> None:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(text.encode())

    return Place(url, keep, put)


def redis_place(scheme: str, url: str) -> Place:
    def keep() -> str:
        with Redis.from_url(url) as client:
            found = {
                base64.b64encode(key).decode(): [base64.b64encode(client.dump(key) or b"").decode(), client.pttl(key)]
                for key in sorted(client.scan_iter(count=1_000))
            }
        return json.dumps(found, indent=0)

    def put(text: str) -> None:
        with Redis.from_url(url) as client:
            for key, (value, left) in json.loads(text).items():
                client.restore(base64.b64decode(key), max(left, 0), base64.b64decode(value))

    return Place(f"{scheme}{url.removeprefix('redis')}", keep, put)


REDIS: Final[Mapping[str, str]] = {"redis": "redis", "bullmq": "bullmq+redis", "bull": "bull+redis"}
"""The schemes of what is on Redis."""
KINDS: Final = ("sqlite", "file", "postgres", *REDIS)


async def with_place(kind: str, folder: Path, use: Callable[[Place], Awaitable[None]]) -> None:
    """Use a fresh place of this kind."""
    match kind:
        case "sqlite":
            await use(sqlite_place(folder))
        case "file":
            await use(file_place(folder))
        case "postgres":
            with postgres() as url:
                await use(postgres_place(url))
        case _:
            with valkey() as server:
                await use(redis_place(REDIS[kind], server.url))


def written(version: str, kind: str) -> Path:
    return Path(__file__).with_name(f"queue-{version}-{kind}.txt")


async def main() -> None:
    for kind in KINDS:

        async def leave(place: Place, kind: str = kind) -> None:
            await fill(place.url)
            written(sys.argv[1], kind).write_text(place.keep() + "\n")

        with tempfile.TemporaryDirectory() as folder:
            await with_place(kind, Path(folder), leave)
        print(kind)


if __name__ == "__main__":
    asyncio.run(main())
