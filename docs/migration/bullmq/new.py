"""The same shop, on the same queue, whose scheduler goes on.

python -m workers run new:tasks
python new.py
"""

import asyncio
import os
from datetime import timedelta

from workers import Job, Queue, RetryPolicy, Tasks
from workers.storage import open_storage

URL = os.environ.get("QUEUE_URL", "bullmq+redis://127.0.0.1:6379/0?queue=shop")
tasks = Tasks(Queue(open_storage(URL), concurrency=10))


@tasks.task
async def send(to: str, text: str) -> str:
    return f"sent {text} to {to}"


@tasks.task(max_attempts=5, retry=RetryPolicy(initial=timedelta(seconds=1), multiplier=1))
async def charge(job: Job, order: int) -> str:
    if job.attempt == 1:
        raise ConnectionError("the bank is busy")
    return f"charged order {order} in attempt {job.attempt}"


@tasks.task
async def clean_up() -> None:  # whose jobs the queue's scheduler makes
    print("cleaned up")


async def main() -> None:
    print(await (await send.enqueue("bob", text="hello")).result())
    print(await (await charge.enqueue(7)).result())
    later = await send.options(delay=timedelta(seconds=1)).enqueue("carol", text="good morning")
    print(await later.result())


if __name__ == "__main__":
    asyncio.run(main())
