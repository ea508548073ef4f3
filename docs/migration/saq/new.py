"""The same shop.

python -m workers run new:tasks
python new.py
"""

import asyncio
import os
from datetime import timedelta

from workers import Job, Queue, RetryPolicy, Tasks
from workers.storage import open_storage

URL = os.environ.get("QUEUE_URL", "redis://127.0.0.1:6379/0?queue=shop")
tasks = Tasks(Queue(open_storage(URL), concurrency=10))


@tasks.task
async def send(to: str, text: str) -> str:
    return f"sent {text} to {to}"


@tasks.task(max_attempts=5, retry=RetryPolicy(initial=timedelta(seconds=1), multiplier=1))
async def charge(job: Job, order: int) -> str:
    if job.attempt == 1:
        raise ConnectionError("the bank is busy")
    return f"charged order {order} in attempt {job.attempt}"


@tasks.cron("* * * * * *")  # or "0 3 * * *", timezone="Europe/Berlin"
async def clean_up() -> None:
    print("cleaned up")


async def main() -> None:
    print(await (await send.enqueue(to="bob", text="hello")).result())
    print(await (await charge.enqueue(order=7)).result())
    later = await send.options(delay=timedelta(seconds=1)).enqueue(to="carol", text="good morning")
    print(await later.result())


if __name__ == "__main__":
    asyncio.run(main())
