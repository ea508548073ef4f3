"""What chains cost, compared with as many plain jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.ours import process
from bench.storages import PAYLOAD, fill, open_storage
from workers import Job, continue_with


@dataclass(frozen=True, slots=True, kw_only=True)
class _Took:
    """Seconds to enqueue, and to process."""

    enqueueing: float
    processing: float

    @property
    def whole(self) -> float:
        return self.enqueueing + self.processing


async def chains(kind: str, concurrency: int, links: int, jobs: int) -> dict[str, float]:
    """Measure links of chains and plain jobs per second, enqueued and processed, and only processed; and compare them.

    Both are enqueued in batches of the same size: of a chain only its first link, which is what starting a chain
    enqueues, and every plain job. No record is kept. `times_as_long` compares the whole, which is what a user pays for.
    """
    starts = max(1, jobs // links)
    plain = await _measure(kind, concurrency, starts * links, 1)
    chained = await _measure(kind, concurrency, starts, links)
    count = starts * links
    return {
        "plain_per_s": count / plain.whole,
        "links_per_s": count / chained.whole,
        "times_as_long": chained.whole / plain.whole,
        "plain_processed_per_s": count / plain.processing,
        "links_processed_per_s": count / chained.processing,
        "processing_times_as_long": chained.processing / plain.processing,
    }


async def _measure(kind: str, concurrency: int, starts: int, links: int) -> _Took:
    """Measure `starts` chains of `links` links. A plain job is a chain of one link."""

    async def handle(job: Job) -> object:
        return continue_with("wanted", PAYLOAD) if job.chain_index + 1 < links else None

    async with open_storage(kind) as storage:
        started = time.perf_counter()
        await fill(storage, starts)
        enqueued = time.perf_counter()
        await process(storage, concurrency, starts * links, handle)
        return _Took(enqueueing=enqueued - started, processing=time.perf_counter() - enqueued)
