"""A task that recurs, once each time over all workers: `python -m workers run recurring:tasks`."""

from datetime import timedelta

from workers import Queue, Tasks
from workers.storage.memory import MemoryStorage

tasks = Tasks(Queue(MemoryStorage()))  # SQLite, PostgreSQL or Redis for several processes


@tasks.cron(every=timedelta(seconds=1))  # or "0 3 * * *", timezone="Europe/Berlin"
async def tick() -> None:
    print("tick")
