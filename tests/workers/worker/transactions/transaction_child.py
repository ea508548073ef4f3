"""Handlers killed within their own transaction: `python -m tests.workers.worker.transactions.transaction_child URL`.

For k = 1, 2, ... a forked process runs one job in the queue `kill-k` and kills itself before the k-th thing that its
transaction asks of the database; the first that has nothing left to ask survives. Prints a line for each that was
killed: whether that was `before` its commit, `amid` it, or `after`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from datetime import timedelta

from sqlalchemy import Connection, Engine, event, text

from workers.chains import continue_with
from workers.jobs import NewJob
from workers.storage.sql import SqlStorage
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.handlers import Job

LEASE = timedelta(seconds=3)


class Fuse:
    """Kills this process when it is burnt down, and prints `stage`; only asyncio engines burn it: the handlers' are.

    What else the worker asks of the database, such as to renew a lease, burns it too, sooner or later from run to run.
    """

    def __init__(self, length: int) -> None:
        self._left = length
        self.stage = "before"
        self.own: Connection | None = None
        """The connection of the handler's transaction."""
        event.listen(Engine, "before_cursor_execute", lambda connection, *_: self._of(connection))
        event.listen(Engine, "commit", self._commits)

    def _of(self, connection: Connection) -> None:
        if connection.dialect.is_async:
            self.burn()

    def _commits(self, connection: Connection) -> None:
        self._of(connection)
        if connection is self.own:
            self.stage = "amid"

    def burn(self) -> None:
        self._left -= 1
        if not self._left:
            print(self.stage, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


async def work(url: str, number: int) -> None:
    storage = SqlStorage(url, f"kill-{number}")
    await storage.connect()
    await storage.enqueue([NewJob(id="job", name="first", payload=b"1")])
    fuse = Fuse(number)

    async def first(job: Job) -> None:
        async with job.transaction() as session:
            fuse.own = (await session.connection()).sync_connection
            for what in ("one", "two"):
                values = {"queue": storage.queue, "what": what}
                await session.execute(text("INSERT INTO ledger (queue, what) VALUES (:queue, :what)"), values)
            await storage.enqueue([NewJob(id="side", name="side", payload=b"")], connection=session)
            job.complete(continue_with("second", 2))
        fuse.stage = "after"
        fuse.burn()
        worker.stop()

    worker = Worker(storage, {"first": first}, lease=LEASE)
    async with asyncio.timeout(PATIENCE):
        await worker.run()
    await storage.disconnect()


def main(url: str) -> None:
    for number in itertools.count(1):
        child = os.fork()
        if not child:
            asyncio.run(work(url, number))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            return


if __name__ == "__main__":
    main(sys.argv[1])
