"""Two mails a second to each customer, whatever the others get: `python rate_limited.py`."""

import asyncio

from workers import Limit, Queue, QueueOptions
from workers.storage.memory import MemoryStorage


async def main() -> None:
    queue = Queue(MemoryStorage(), options=QueueOptions(limits={"send": Limit("2/s")}))
    queue.execute({"send": lambda job: print(job.payload)})
    async with queue:  # runs a worker until the block ends
        await asyncio.gather(*(queue.enqueue_and_wait(to, name="send", limit_key=to) for to in ("ann", "bob") * 3))


asyncio.run(main())
