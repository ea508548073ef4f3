"""`python -m tests.acceptance.fan_out COUNT`: an application that owes one post to COUNT servers, to be killed."""

from __future__ import annotations

import asyncio
import sys

import federation
from federation.base.queues.job_data import POST_JOB

PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{}}'


async def main(count: int) -> None:
    """The fan-out is committed and its jobs are added."""
    servers = [f"https://s{number}.example" for number in range(count)]
    async with federation.transaction() as session:
        await federation.enqueue_fanout(session, POST_JOB, "/api/auth/social/posts", servers, PAYLOAD)
        print("writing", flush=True)
    await federation.close_federation()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
