"""A job that tells how far it is: `python -m workers run progress:tasks`; `show progress:tasks ID` reads it."""

import asyncio

from workers import Job, Queue, Tasks
from workers.storage.file import FileStorage

tasks = Tasks(Queue(FileStorage("jobs")))


@tasks.task
async def convert(job: Job, film: str) -> None:
    for percent in range(0, 101, 20):
        job.progress(f"{film}: {percent} %")  # in code: `(await queue.get_status(id)).progress`
        await asyncio.sleep(0.2)  # the work
