"""A worker process of ours that delivers, measured from inside, and what the database says of its attempts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import statistics
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlmodel import col

from bench.deliveries import cpu_seconds, enqueue, is_owed, make_tables, register
from bench.sampling import Samples
from bench.server_cpu import cpu_of
from db import DeliveryAttempt, DeliveryJob
from federation.base.logs import configure_logging
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from federation.runtime.nodes import set_aside_loaded
from federation.runtime.workers import FederationWorkers


@contextlib.asynccontextmanager
async def fresh_federation() -> AsyncIterator[Federation]:
    """Open the node of this environment, whose database is made, and which knows all peers."""
    configure_logging("warning")
    settings = Settings.from_values(os.environ)
    make_tables()
    federation = Federation(settings)
    try:
        await register(federation, json.loads(os.environ["BENCH_PEERS"]))
        yield federation
    finally:
        await federation.close()


async def deliver_all(*, profiled: bool) -> dict[str, Any]:
    """Deliver what is owed, and return what it took; with `profiled` also the stacks, as `folded`."""
    samples, deliveries = Samples(), int(os.environ["BENCH_DELIVERIES"])
    async with fresh_federation() as federation:
        workers = FederationWorkers(federation)
        await enqueue(federation, [peer["url"] for peer in json.loads(os.environ["BENCH_PEERS"])], deliveries)
        set_aside_loaded()
        servers = [cpu_of(os.environ["DATABASE_URL"]), cpu_of(os.environ.get("REDIS_URL", ""))]
        before = [each.seconds() for each in servers]
        began, started, cpu = datetime.now(UTC), time.perf_counter(), cpu_seconds()
        with samples.taken() if profiled else contextlib.nullcontext():
            workers.start()
            await emptied(federation)
            seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
            database, queue = (each.seconds() - first for each, first in zip(servers, before, strict=True))
        await workers.stop()
        await federation.attempts.close()
        found = {
            "deliveries_per_s": deliveries / seconds,
            "cpu_ms_each": cpu * 1000 / deliveries,
            "database_ms_each": database * 1000 / deliveries,
            "queue_ms_each": queue * 1000 / deliveries,
            **await outcome(federation, began),
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    return found | ({"folded": samples.folded()} if profiled else {})


async def emptied(federation: Federation) -> None:
    """Wait until nothing is owed any more."""
    is_full = True
    while is_full:
        await asyncio.sleep(0.05)
        is_full = await is_owed(federation)


async def outcome(federation: Federation, since: datetime) -> dict[str, float]:
    """Return how long attempts took that began since then, and what went wrong: both counts should be 0.

    `failed` counts deliveries that failed, `held` attempts made after a delivery had been held.
    """
    attempt = DeliveryAttempt
    times = select(col(attempt.duration_ms)).where(col(attempt.started_at) >= since)
    durations = [row[0] for row in await federation.database.rows(times)]
    again = select(func.count()).select_from(attempt).where(col(attempt.series) > 0)
    return {
        "p50_ms": statistics.median(durations),
        "p99_ms": statistics.quantiles(durations, n=100)[98],
        "failed": (await federation.database.rows(select(func.count()).select_from(DeliveryJob)))[0][0],
        "held": (await federation.database.rows(again))[0][0],
    }
