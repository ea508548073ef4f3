"""The asynchronous calls from one event loop after the other, and from several at once."""

from __future__ import annotations

import json
import subprocess

from sqlalchemy import Engine

from tests import warm
from tests.federation.sync.conftest import owed
from tests.patience import PATIENCE_SECONDS

PROGRAM = """
import asyncio, gc, json, logging, os, sys, threading
import federation
from asgiref.sync import async_to_sync

PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"p"}}'

async def owe():
    async with federation.transaction() as session:
        return await federation.enqueue_delivery(
            session, "deliver-post", "https://b.example/posts", "https://b.example", PAYLOAD
        )

ids = []
def run():
    ids.append(asyncio.run(owe()))

def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

run()
at_first = descriptors()
for _ in range(8):
    run()
    ids.append(async_to_sync(owe)())
after = descriptors()
threads = [threading.Thread(target=run) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]

async def status():
    queue = federation.get_federation_queue()
    return [(await queue.get_status(each)) is not None for each in ids]

print(json.dumps({"ids": ids, "queued": asyncio.run(status()), "fds": [at_first, after],
                  "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()]}))
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm.PYTHON, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


def test_every_event_loop_owes_deliveries_and_their_jobs_are_there(place: dict[str, str], engine: Engine) -> None:
    """`asyncio.run` again and again, `async_to_sync`, and a loop per thread; nothing is left open or said."""
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert owed(engine) == set(found["ids"])
    assert len(found["ids"]) == 21
    assert all(found["queued"])
    at_first, after = found["fds"]
    assert after <= at_first
    assert done.stderr == ""
