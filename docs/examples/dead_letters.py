"""Jobs that fail for good are told of, and move to another queue: `python -m workers run dead_letters:queue`."""

from workers import JobDetails, Queue, QueueOptions
from workers.storage.file import FileStorage

dead = Queue(FileStorage("jobs", "dead"))  # `python -m workers list dead_letters:dead`


async def bury(job: JobDetails) -> None:
    print(job.id, job.payload, job.error and job.error.message)
    await queue.manage.send([job.id], dead)


queue = Queue(FileStorage("jobs"), max_attempts=1, options=QueueOptions(on_failed=bury))
queue.execute(lambda job: 1 / job.payload)
