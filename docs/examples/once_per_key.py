"""A task that runs once per key and hour, and one that runs once a day: `python once_per_key.py`."""

import asyncio
from datetime import UTC, datetime, timedelta

from workers import Job, Queue, Tasks
from workers.kv import MemoryKvStore
from workers.storage.sql import SqlStorage

storage = SqlStorage("sqlite:///once_per_key.sqlite3", "background")
queue = Queue(storage, result_ttl=timedelta(days=2))
tasks = Tasks(queue, MemoryKvStore(), deduplication_ttl=timedelta(hours=1))


@tasks.task("reindex")
async def reindex(job: Job) -> None:
    print("reindexing", job.payload)


@tasks.task("report")
async def report(job: Job) -> str:
    return f"report of {job.id}"


async def main() -> None:
    await storage.migrate()
    queue.execute(tasks.handlers())
    async with queue:
        for _ in range(3):
            print((await tasks.enqueue_task(reindex, "posts", deduplication_key="posts")).status)
        # Call this from cron as often as you like: the id names the day, and is taken while its result is kept.
        today = f"daily-{datetime.now(UTC):%Y-%m-%d}"
        for _ in range(2):
            print(await queue.enqueue_and_wait(None, name="report", id=today))


if __name__ == "__main__":
    asyncio.run(main())
