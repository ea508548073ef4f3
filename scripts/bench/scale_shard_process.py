"""A worker on one of several queues, told what to do by lines of JSON; see `scale_shards.py`.

python scripts/bench/scale_shard_process.py <storage url> <queue>
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from workers import Job, Queue, Worker
from workers.storage import open_storage


class Seen:
    """What came, and whether each server's jobs came in their order: job n after job n - 1, or once more."""

    def __init__(self) -> None:
        self.done = self.again = self.disordered = 0
        self._last: dict[str, int] = {}

    async def __call__(self, job: Job) -> None:
        """Note a job."""
        assert isinstance(job.payload, dict)
        server, number = str(job.payload["server"]), int(job.payload["number"])
        last = self._last.get(server, -1)
        if number <= last:
            self.again += 1
            return
        self.disordered += number != last + 1
        self._last[server] = number
        self.done += 1

    def told(self) -> dict[str, float]:
        """Return the counts so far, and the processor time of this process."""
        counts = {"done": self.done, "again": self.again, "disordered": self.disordered}
        return {**counts, "cpu": time.process_time()}


async def main() -> None:
    """Work, and answer each line with the counts, until the input ends."""
    storage = open_storage(sys.argv[1], queue=sys.argv[2])
    seen = Seen()
    worker = Worker(storage, {"*": seen}, concurrency=50)
    async with Queue(storage):
        working = asyncio.create_task(worker.run())
        print(json.dumps({"ok": "ready"}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"ok": seen.told()}), flush=True)
        worker.stop()
        await working


if __name__ == "__main__":
    asyncio.run(main())
