"""The processes that are killed: producers, consumers, and one that holds a single claim."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, TypeVar

from tests.chaos import demands
from tests.chaos.ledger import Ledger, RecordedStorage, now
from workers import StorageUnavailable, Worker, WorkerOptions
from workers.jobs import Completed
from workers.storage.base import Storage
from workers.storage.file import journal as file_journal
from workers.storage.urls import open_storage
from workers.worker.events import WorkerEvent, WorkerEventKind
from workers.worker.handlers import Job

T = TypeVar("T")

NEVER: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a child is to do; travels as JSON."""

    role: str
    name: str
    url: str
    queue: str
    seed: str
    """Of the jobs, the same for all of a round."""
    ledger: str
    lease: float
    batches: int = NEVER
    """How many a producer enqueues before it ends."""
    again: tuple[str, ...] = ()
    """What a producer begins with: jobs another one was killed over, unacknowledged."""


async def produce(order: Order, ledger: Ledger) -> None:
    """Batches are enqueued, each repeated until the storage answers, and in the ledger before and after."""
    storage = open_storage(order.url, queue=order.queue)
    await _insist(storage.connect, ledger)
    chance = random.Random(order.name)
    if order.again:
        await _enqueue(storage, order, ledger, list(order.again), again=True)
    for batch in range(order.batches):
        ids = [f"{order.name}-{batch}-{number}" for number in range(chance.randint(1, 12))]
        await _enqueue(storage, order, ledger, ids, again=False)
        for job_id in ids:
            if demands.kind_of(order.seed, job_id) is demands.Kind.CANCELLED:
                await asyncio.sleep(chance.choice([0, 0.01]))
                await _cancel(storage, job_id, ledger)
        await asyncio.sleep(chance.expovariate(1 / 0.03))
    await storage.disconnect()


async def _enqueue(storage: Storage, order: Order, ledger: Ledger, ids: list[str], *, again: bool) -> None:
    jobs = [demands.job_of(order.seed, job_id) for job_id in ids]
    if not storage.capabilities.ordering_keys:
        jobs = [replace(job, ordering_key=None) for job in jobs]
    if not storage.capabilities.limit_keys:
        jobs = [replace(job, limit_key=None, fair_key=None) for job in jobs]
    if not storage.capabilities.dependencies:
        jobs = [replace(job, after=()) for job in jobs]
    tries = 0

    async def enqueue() -> list[str]:
        nonlocal tries
        tries += 1
        ledger.write("intended", asked=now(), ids=ids)
        return [result.status.value for result in await storage.enqueue(jobs)]

    statuses = await _insist(enqueue, ledger)
    ledger.write("acknowledged", ids=ids, statuses=statuses, fresh=not again and tries == 1)


async def _cancel(storage: Storage, job_id: str, ledger: Ledger) -> None:
    tries = 0

    async def cancel() -> str:
        nonlocal tries
        tries += 1
        return (await storage.cancel(job_id)).value

    answer = await _insist(cancel, ledger)
    ledger.write("cancelled", id=job_id, answer=answer, answered=now(), fresh=tries == 1)


async def _insist(call: Callable[[], Awaitable[T]], ledger: Ledger) -> T:
    """The call's answer, however often it takes: an unavailable storage may be asked again."""
    while True:
        try:
            return await call()
        except StorageUnavailable as error:
            _note(ledger, error)
            await asyncio.sleep(0.02)


def _note(ledger: Ledger, error: BaseException | None) -> None:
    expected = isinstance(error, StorageUnavailable)
    ledger.write("trouble", expected=expected, error=f"{type(error).__name__}: {error}")


async def consume(order: Order, ledger: Ledger) -> None:
    """A worker runs until SIGTERM; it trusts the storage to wake it."""

    async def handle(job: Job) -> object:
        assert isinstance(job.payload, dict)
        await asyncio.sleep(job.payload["seconds"])
        return demands.run(job)

    def note(event: WorkerEvent) -> None:
        if event.kind is WorkerEventKind.ERROR:
            _note(ledger, event.error)

    storage: Storage = RecordedStorage(open_storage(order.url, queue=order.queue), ledger)
    worker = Worker(
        storage,
        {"work": handle, "*": handle},
        concurrency=random.Random(order.name).randint(1, 20),
        lease=timedelta(seconds=order.lease),
        observers=[note],
        options=WorkerOptions(
            worker_id=order.name, poll_interval=timedelta(hours=1), grace=timedelta(milliseconds=100), max_stalls=NEVER
        ),
    )
    _at_sigterm(worker.stop)
    await worker.run()


def _at_sigterm(call: Callable[[], None]) -> None:
    """A signal that came before, which the nursery blocked, counts too."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, call)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


async def hold(order: Order, ledger: Ledger) -> None:
    """One job is claimed, kept without renewal, and settled at SIGTERM."""
    storage = RecordedStorage(open_storage(order.url, queue=order.queue), ledger)
    asked = asyncio.Event()
    _at_sigterm(asked.set)
    await storage.connect()
    [claim] = await storage.claim(order.name, leases={"*": timedelta(seconds=order.lease)}, limit=1)
    await asked.wait()
    await _insist(lambda: storage.settle([Completed(claim=claim, result=b'"late"')]), ledger)
    await storage.disconnect()


_ROLES: Final[dict[str, Callable[[Order, Ledger], Awaitable[None]]]] = {
    role.__name__: role for role in (produce, consume, hold)
}


def live(order: Order) -> None:
    """The child has done what it was told."""
    # Broken connections are no errors here, nor is giving up on jobs at a stop: on a slow machine it takes too long.
    logging.disable(logging.WARNING)
    logging.getLogger("workers.worker").setLevel(logging.CRITICAL)
    file_journal.SLACK_BYTES = 100_000  # so that some kills hit a compaction
    ledger = Ledger(order.ledger)
    ledger.write("began", at=now(), wall_clock=time.time())
    with suppress(KeyboardInterrupt):
        asyncio.run(_ROLES[order.role](order, ledger))
