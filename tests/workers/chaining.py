"""Queues served by a worker elsewhere, and chains of three links to put into them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from tests.workers.running import AT_ONCE, Recorder, running
from workers import WorkerOptions
from workers.chains import Chain, Continuation, continue_with
from workers.queue import Queue
from workers.testing import Harness
from workers.testing.steps import LEASE
from workers.worker import Worker
from workers.worker.handlers import HandlerFunction, Job, Signal

MINUTE: Final = timedelta(minutes=1)
Handlers = Mapping[str, HandlerFunction]


@asynccontextmanager
async def serving(harness: Harness, handlers: Handlers) -> AsyncIterator[tuple[Queue, Recorder]]:
    """A client of a queue that another client's worker serves, whom its own renewals would tell of nothing in time."""
    storage, recorder = await harness.open(), Recorder()
    elsewhere = await harness.open(storage.queue)
    worker = Worker(
        elsewhere, handlers, concurrency=10, lease=LEASE, observers=[recorder], options=WorkerOptions(retry=AT_ONCE)
    )
    async with Queue(storage) as queue, running(worker):
        yield queue, recorder


async def the_chain(queue: Queue, chain_id: str = "chain") -> Chain:
    """The chain as it stands; it must exist."""
    chain = await queue.get_job_chain(chain_id)
    assert chain is not None, f"chain {chain_id!r} should exist"
    return chain


def number(job: Job) -> int:
    assert isinstance(job.payload, int)
    return job.payload


async def add_one(job: Job) -> Continuation:
    return continue_with("second", number(job) + 1)


def add_two(job: Job) -> Continuation:
    return continue_with("third", number(job) + 2)


async def ten_times(job: Job) -> int:
    return number(job) * 10


LINKS: Final[Handlers] = {"first": add_one, "second": add_two, "third": ten_times}


class Holding:
    """A handler that notes the signals of its jobs, and returns `result` when it is cancelled, or released."""

    def __init__(self, result: object) -> None:
        self.signals: list[Signal] = []
        self.released = asyncio.Event()
        self._result = result

    async def __call__(self, job: Job) -> object:
        self.signals.append(job.signal)
        with contextlib.suppress(asyncio.CancelledError):
            await self.released.wait()
        return self._result
