"""Many threads, a fork, and the interpreter's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest
from sqlalchemy import Engine

import federation
import federation.sync
from federation.tasks import task
from tests.federation.sync.conftest import owed
from tests.federation.sync.test_sessions import PAYLOAD, SERVER, TARGET, queued
from tests.patience import PATIENCE_SECONDS, until
from workers import EnqueueStatus, Job

THREADS = 8


@task("tests.sync.counted")
def counted(job: Job) -> None:
    """Never run."""


@pytest.mark.parametrize("place", ["sqlite", "bullmq-postgres"], indirect=True)
async def test_eight_threads_owe_side_by_side(node: dict[str, str], engine: Engine, full: bool) -> None:
    """All of it is there once, with its jobs, and nobody hangs."""
    each = 1_000 if full else 50
    ids: list[str] = []

    def owe() -> None:
        for _ in range(each):
            with federation.sync.transaction() as session:
                ids.append(federation.sync.enqueue_delivery(session, "n", TARGET, SERVER, PAYLOAD))

    threads = [threading.Thread(target=owe) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    await until(lambda: not any(thread.is_alive() for thread in threads), patience=5 * PATIENCE_SECONDS)
    assert len(set(ids)) == THREADS * each
    assert owed(engine) == set(ids)

    async def all_queued() -> bool:
        counts = await federation.get_federation_queue().counts()
        return sum(counts.values()) == THREADS * each

    await until(all_queued)


@pytest.mark.parametrize("place", ["bullmq-postgres"], indirect=True)
def test_threads_that_begin_together_share_their_connections(place: dict[str, str]) -> None:
    """What the first call opens is opened once, and closed by `close`: none is left to the garbage collector."""
    gate = threading.Barrier(THREADS)

    def owe() -> None:
        gate.wait(PATIENCE_SECONDS)
        with federation.sync.transaction() as session:
            seen.add(session.get_bind())

    for _ in range(10):
        seen: set[object] = set()
        threads = [threading.Thread(target=owe) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert len(seen) == 1
        federation.sync.close()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_task_is_queued_with_a_transaction_and_without(place: dict[str, str], engine: Engine) -> None:
    with federation.sync.transaction() as session:
        first = federation.sync.enqueue_task(counted, {"n": 1}, session=session, deduplication_key="k")
    second = federation.sync.enqueue_task(counted, {"n": 1}, deduplication_key="k")
    assert (first.status, second.status) == (EnqueueStatus.QUEUED, EnqueueStatus.DUPLICATE)
    assert second.id == first.id


FORKING = """
import os, sys, threading
import federation.sync
from tests.federation.sync.test_sessions import owe

def owed():
    with federation.sync.transaction() as session:
        owe(session)

owed()
children = []
for number in range(3):
    child = os.fork()
    if not child:
        try:
            owed()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        sys.exit(0)
    children.append(child)
owed()
ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
[threading.Thread(target=owed).start() for _ in range(4)]
owed()
sys.exit(max(ended))
"""


@pytest.mark.spread("place")
async def test_children_of_a_fork_owe_and_the_end_waits_for_jobs(node: dict[str, str], engine: Engine) -> None:
    """Parent and children end by themselves and in silence; every delivery has its job without a sweep."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    how = {"capture_output": True, "text": True, "timeout": PATIENCE_SECONDS, "check": False}
    done = await asyncio.to_thread(partial(subprocess.run, command, **how))
    assert (done.returncode, done.stderr) == (0, "")
    ids = owed(engine)
    assert len(ids) == 1 + 3 + 1 + 4 + 1
    assert await queued() == ids
