"""A worker whose handler kills its process: `python -m tests.workers.worker.lethal_child URL LOG`; it logs its runs."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from pathlib import Path

from workers.storage.sql import SqlStorage
from workers.worker import Worker
from workers.worker.handlers import Job


async def main(url: str, log: str) -> None:
    async def die(job: Job) -> None:
        with Path(log).open("a") as lines:
            lines.write(f"{job.id} {job.attempt}\n")
        os._exit(9)

    await Worker(SqlStorage(url), {"work": die}, concurrency=1, lease=timedelta(milliseconds=600)).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
