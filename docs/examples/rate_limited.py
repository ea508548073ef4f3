"""Two mails a second to each customer, whatever the others get: `python rate_limited.py`."""

import asyncio

from workers import Queue, Tasks
from workers.storage.memory import MemoryStorage

tasks = Tasks(queue := Queue(MemoryStorage(), concurrency=10))


@tasks.task(rate="2/s", concurrency_per_key=1, key="customer")
async def send(customer: str, number: int) -> None:
    print(customer, number)


async def main() -> None:
    queue.execute(tasks.handlers())
    async with queue:
        mails = [await send.enqueue(customer, number) for number in range(3) for customer in ("ann", "bob")]
        await asyncio.gather(*(mail.result() for mail in mails))


asyncio.run(main())
