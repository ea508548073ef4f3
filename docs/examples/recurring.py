"""A task that recurs, on however many workers once each time: `python recurring.py`."""

import asyncio
from datetime import timedelta

from workers import Queue, Tasks
from workers.storage.memory import MemoryStorage

tasks, done = Tasks(queue := Queue(MemoryStorage())), asyncio.Event()


@tasks.cron(every=timedelta(seconds=1))
async def tick() -> None:
    print("tick")
    done.set()


async def main() -> None:
    queue.execute(tasks.handlers())
    async with queue:
        await done.wait()


asyncio.run(main())
