"""Jobs that failed are read, exported and sent to another queue: `python dead_letters.py`."""

import asyncio

from workers import Queue, UnrecoverableError
from workers.storage.memory import MemorySpace, MemoryStorage


async def refuse(job):
    raise UnrecoverableError(f"nobody is called {job.payload}")


async def main():
    space, failed = MemorySpace(), asyncio.Event()
    queue = Queue(MemoryStorage(space, "mail"), on_failed=lambda job: failed.set())
    dead = Queue(MemoryStorage(space, "dead"))
    queue.execute(refuse)
    async with queue, dead:
        await queue.enqueue("bob", id="mail-1")
        await failed.wait()
        for job in [job async for job in queue.manage.failed(error="UnrecoverableError")]:
            print(job.id, job.payload, job.error.message, len(job.failures))
        print("sent:", await queue.manage.send(["mail-1"], dead), (await dead.get_job("mail-1")).payload)


if __name__ == "__main__":
    asyncio.run(main())
