"""`python -m tests.acceptance.lost_producer SERVER COUNT`: an application that owes COUNT posts, to be killed.

Prints `ready`, waits for a line, and writes.
"""

from __future__ import annotations

import asyncio
import sys

import federation
from federation.base.queues.job_data import POST_JOB
from federation.base.settings.settings import Settings
from federation.node.posts import POSTS_PATH
from tests.acceptance.site import numbered, post


async def main(server: str, count: int) -> None:
    """The posts `lost-0`, `lost-1` ... are owed to the server, in one commit, and their jobs are added."""
    own_url = Settings.load().better_auth_url
    assert own_url is not None
    async with federation.transaction() as session:
        for post_id in numbered("lost", count):
            await federation.enqueue_delivery(session, POST_JOB, server + POSTS_PATH, server, post(own_url, post_id))
    await federation.close_federation()


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
