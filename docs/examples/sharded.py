"""Four queues in four places, and each server's jobs in one of them, in order: `python sharded.py`.

`SHARD=2 python -m workers run sharded:queue` works on one of the four. All processes have the same `SHARDS`.
"""

import asyncio
import os
import zlib
from contextlib import AsyncExitStack

from workers import Job, Queue
from workers.storage import open_storage

PLACES = os.environ.get("SHARDS", "memory://0 memory://1 memory://2 memory://3").split()
shards = [Queue(open_storage(place, queue="deliveries")) for place in PLACES]
queue = shards[int(os.environ.get("SHARD", "0"))]


def shard_of(server: str) -> Queue:
    return shards[zlib.crc32(server.encode()) % len(shards)]


async def deliver(job: Job) -> None:
    print(job.payload)


queue.execute(deliver)


async def main() -> None:
    async with AsyncExitStack() as stack:
        for each in shards:
            each.execute(deliver)
            await stack.enter_async_context(each)
        for text in ("first", "second"):
            for server in ("a.example", "b.example", "c.example"):
                await shard_of(server).enqueue(f"{server} {text}", ordering_key=server)
        for server in ("a.example", "b.example", "c.example"):
            await shard_of(server).enqueue_and_wait(f"{server} last", ordering_key=server)


if __name__ == "__main__":
    asyncio.run(main())
