"""How long claims take while very many finished records expire at one moment and a reaper removes them."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from bench.storages import BATCH, fill, open_storage
from workers import DROP, NewJob, Reaper, Storage, new_id
from workers.jobs import Completed

CLAIMS_PER_SECOND: Final = 100
ENQUEUED_AT_ONCE: Final = 10
QUIET_SECONDS: Final = 5.0
"""How long claims are measured before the records expire, unless filling takes less."""
MOST_IN_A_FILE: Final = 100_000

_LEASE: Final = timedelta(minutes=1)
_PAYLOAD: Final = b"x" * 100
_RESULT: Final = b"y" * 100
_REHEARSED: Final = 10
"""How many batches are timed to predict how long the others will take."""
_SLACK: Final = 1.2
_ROUNDED_UP: Final = 0.002
"""By how many seconds a storage may lengthen a retention."""
_AT_LEAST: Final = timedelta(milliseconds=1)
"""The retention of a result that is written too late for the common moment."""


def records_of(kind: str, wanted: int) -> int:
    """Return how many results are measured on this storage; 0 on BullMQ, which has no sweep.

    BullMQ removes when jobs finish. A file's queue is held in memory by every process, and compacted as a whole, which
    takes seconds with a million results: it is no storage for that many.
    """
    return {"bullmq": 0, "file": min(wanted, MOST_IN_A_FILE)}.get(kind, wanted)


async def expiry(kind: str, records: int) -> dict[str, float]:
    """Measure claims, in ms, before and while `records` results are removed, and the seconds until all are gone.

    All results end at one moment after the filling, which is predicted from a first few; nobody sweeps before. A
    claim's time counts from the moment at which it was due, so that a claim which delays others counts for all of them.
    """
    async with open_storage(kind) as storage:
        end = await _keep_until_one_moment(storage, records)
        quiet = _Claims(storage)
        async with quiet:
            await asyncio.sleep(max(0.0, end - time.perf_counter()))
        during = _Claims(storage)
        started = time.perf_counter()
        async with during:
            await Reaper(storage).reap()
            gone = time.perf_counter() - started
        if await storage.sweep(1):
            sys.exit(f"{kind}: some results had not expired when the sweep began")
    return {
        "quiet_p99.9_ms": _quantile(quiet.times, 0.999),
        "p50_ms": _quantile(during.times, 0.5),
        "p99_ms": _quantile(during.times, 0.99),
        "p99.9_ms": _quantile(during.times, 0.999),
        "max_ms": max(during.times),
        "claims": len(during.times),
        "all_gone_s": gone,
    }


async def _keep_until_one_moment(storage: Storage, records: int) -> float:
    """Store `records` results that all end at one moment, and return that moment, by `perf_counter`."""
    started = time.perf_counter()
    await _finish(storage, _REHEARSED * BATCH, None)
    filling = (time.perf_counter() - started) / _REHEARSED * records / BATCH
    quiet = min(QUIET_SECONDS, filling)
    end = time.perf_counter() + _SLACK * filling + quiet
    latest = await _finish(storage, records, end)
    return max(latest, time.perf_counter() + quiet)


async def _finish(storage: Storage, count: int, end: float | None) -> float:
    """Enqueue, claim and complete jobs, whose results are kept until about `end`.

    Return a moment by which all have ended. None keeps nothing.
    """
    latest = 0.0
    for start in range(0, count, BATCH):
        size = min(BATCH, count - start)
        await storage.enqueue([NewJob(id=new_id(), name="finished", payload=_PAYLOAD) for _ in range(size)])
        claims = await storage.claim("filler", leases={"finished": _LEASE}, limit=size)
        keep = DROP if end is None else max(_AT_LEAST, timedelta(seconds=end - time.perf_counter()))
        await storage.settle([Completed(claim=claim, result=_RESULT, keep=keep) for claim in claims])
        if keep is not DROP:
            latest = max(latest, time.perf_counter() + keep.total_seconds() + _ROUNDED_UP)
    return latest


class _Claims:
    """Claims and completes jobs at a steady rate while the context lasts; `times` are milliseconds of claims."""

    def __init__(self, storage: Storage) -> None:
        self.times: list[float] = []
        self._storage = storage
        self._ending = asyncio.Event()

    async def __aenter__(self) -> None:
        await fill(self._storage, CLAIMS_PER_SECOND)
        self._running = asyncio.create_task(self._run())

    async def __aexit__(self, *_: object) -> None:
        self._ending.set()
        await self._running

    async def _run(self) -> None:
        started, made = time.perf_counter(), 0
        async with asyncio.TaskGroup() as group:
            while not (self.times and self._ending.is_set()):
                due = started + made / CLAIMS_PER_SECOND
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if made % ENQUEUED_AT_ONCE == 0:
                    group.create_task(fill(self._storage, ENQUEUED_AT_ONCE))
                group.create_task(self._claim(due))
                made += 1

    async def _claim(self, due: float) -> None:
        claims = await self._storage.claim("steady", leases={"wanted": _LEASE}, limit=1)
        self.times.append((time.perf_counter() - due) * 1000)
        await self._storage.settle([Completed(claim=claim, result=b"", keep=DROP) for claim in claims])


def _quantile(samples: Sequence[float], part: float) -> float:
    """Return the least sample that so large a part of all does not exceed."""
    return sorted(samples)[math.ceil(part * len(samples)) - 1]
