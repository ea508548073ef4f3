"""Makes what a release leaves for later ones to read: an SQLite database, with rows and queues, of a node that owes.

    python -m tests.acceptance.releases VERSION

Writes `VERSION.sql` beside this file, by the code of this checkout. A file is made anew until its version is released,
and never after that. `test_releases.py` reads them all.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from federation.base.queues.job_data import POST_JOB
from federation.base.settings.settings import Settings
from federation.cli.running import upgrade
from federation.node.posts import POSTS_PATH
from tests.acceptance.moves import application
from tests.acceptance.releases.owed import HELD, PLACE, QUEUED, UNQUEUED
from tests.acceptance.site import OWN_URL, post
from tests.federation.protocol.vectors import A


async def owe(environment: dict[str, str]) -> None:
    """Deliveries are owed: with a job, without one, and held by an operator."""
    async with application(environment) as node:

        async def owed(names: list[str]) -> list[str]:
            async with node.outbox.transaction() as session:
                return [
                    await node.outbox.enqueue_delivery(
                        session, POST_JOB, PLACE + POSTS_PATH, PLACE, post(OWN_URL, name)
                    )
                    for name in names
                ]

        await owed(QUEUED)
        await node.delivery_queue.storage.remove(await owed(UNQUEUED))
        await node.links.hold(PLACE)
        await owed(HELD)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "node.sqlite3"
        environment = {"BETTER_AUTH_URL": OWN_URL, **A.env, "DATABASE_URL": f"sqlite:///{file}"}
        environment["DEV_ALLOWED_HOSTNAMES"] = "127.0.0.1"
        upgrade(Settings.from_values(environment))
        asyncio.run(owe(environment))
        with closing(sqlite3.connect(file)) as connection:
            dumped = "\n".join(connection.iterdump())
    Path(__file__).with_name(f"{sys.argv[1]}.sql").write_text(dumped + "\n")


if __name__ == "__main__":
    main()
