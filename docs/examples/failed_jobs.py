"""What fails is tried again; what fails for good is kept, and can be retried: `python failed_jobs.py`."""

import asyncio
from datetime import timedelta

from workers import Job, JobFailedError, JobState, Queue, RetryPolicy, UnrecoverableError
from workers.storage.sql import SqlStorage

addresses = {"bob": "bob@example.org"}


async def send(job: Job) -> str:
    if job.attempt == 1:
        raise ConnectionError("the mail server is busy")  # any error: tried again, after the back-off
    if job.payload not in addresses:
        raise UnrecoverableError(f"nobody is called {job.payload}")  # failed now, whatever attempts are left
    return f"sent to {addresses[job.payload]} at attempt {job.attempt}"


async def main() -> None:
    storage = SqlStorage("sqlite:///failed_jobs.sqlite3", "mail")
    await storage.migrate()
    queue = Queue(storage, max_attempts=3, retry=RetryPolicy(initial=timedelta(milliseconds=50)))
    queue.execute({"send": send})
    async with queue:
        print(await queue.enqueue_and_wait("bob", name="send"))
        try:
            await queue.enqueue_and_wait("carol", name="send", id="mail-carol")
        except JobFailedError as failed:
            print(failed)
        dead = (await queue.manage.list(JobState.FAILED)).jobs
        addresses["carol"] = "carol@example.org"
        print("retried:", await queue.manage.retry([job.id for job in dead]))
        print(await queue.enqueue_and_wait("carol", name="send", id="mail-carol"))  # waits for the job of that id


if __name__ == "__main__":
    asyncio.run(main())
