"""A queue in a file: `python first_job.py`. A job is enqueued, runs, and its result comes back."""

import asyncio

from workers import Job, Queue
from workers.storage.sql import SqlStorage


async def greet(job: Job) -> str:
    return f"hello, {job.payload}"


async def main() -> None:
    storage = SqlStorage("sqlite:///first_job.sqlite3", "greetings")
    await storage.migrate()  # makes the tables, once
    queue = Queue(storage)
    queue.execute({"greet": greet})
    async with queue:  # runs a worker until the block ends; it could as well be another process
        print(await queue.enqueue_and_wait("alice", name="greet"))
        first = await queue.enqueue("bob", name="greet", id="greet-bob")
        again = await queue.enqueue("bob", name="greet", id="greet-bob")
        print(first.status, again.status)  # an id is enqueued once


if __name__ == "__main__":
    asyncio.run(main())
