"""How long an administrator's bulk commands take with very many deliveries: `deliveries stats`, `retry` and `drop`.

    python scripts/bench_admin.py [--place sqlite postgres bullmq] [--rows 1000000] [--jobs 50000] [--profile FILE]

There are `--rows` deliveries, in groups of a thousand that share a text. `--jobs` of them are owed and wait in the
queue, as many have failed and have a failed job, as many have failed and have no job any more, and all the others have
failed for another reason, long ago. `stats` counts them all, `retry` retries those that failed lately, with and without
a job, and `drop` drops all. The queue is beside the rows on SQLite and on PostgreSQL, or on BullMQ with the rows on
PostgreSQL.

Every place is fresh. Prints a table on stderr, with seconds and CPU seconds of this process, and one JSON object on
stdout. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import sys
import time
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import insert

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.node import fresh_places, machine, unwind_when_terminated

from db import DeliveryJob, DeliveryPayload, DeliveryState, new_id
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.bulk import BulkDeliveries
from federation.admin.deliveries.deliveries import Selection
from federation.app import Federation
from federation.base.jobs import POST_JOB
from federation.base.logs import configure_logging
from federation.base.settings import Settings
from federation.cli.running import upgrade
from federation.delivery.rows import delivery_job
from workers import JobState
from workers.jobs import ErrorInfo, Failed
from workers.storage.base import ANY_NAME

PLACES: Final = ("sqlite", "postgres", "bullmq")
GROUP: Final = 1_000
AT_ONCE: Final = 20_000
LATELY, LONG_AGO = "TIMEOUT", "CONN_REFUSED"
PATH: Final = "/api/auth/social/posts"
MINUTE: Final = timedelta(minutes=1)


def main() -> None:
    """Measure at each place asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", nargs="+", default=PLACES, choices=PLACES)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--profile", type=Path, help="write a cProfile of the commands here")
    options = parser.parse_args()
    if options.rows < 3 * options.jobs:
        parser.error("--rows must be at least three times --jobs")
    configure_logging("warning")
    unwind_when_terminated()
    results = []
    for place in options.place:
        with fresh_places(place) as values:
            settings = Settings.from_values(values)
            upgrade(settings)
            results += [{"place": place, **row} for row in asyncio.run(measure(settings, options))]
    for row in results:
        print(
            *(f"{value:>12}" if isinstance(value, str) else f"{value:>12.6g}" for value in row.values()),
            file=sys.stderr,
        )
    print(json.dumps({"rows": options.rows, "jobs": options.jobs, **machine(), "commands": results}))


async def measure(settings: Settings, options: argparse.Namespace) -> list[dict[str, float | str]]:
    federation = Federation(settings)
    bulk = BulkDeliveries(federation.database, federation.delivery_queue)
    profile = cProfile.Profile() if options.profile else None
    try:
        await federation.delivery_queue.start()
        await fill(federation, options.rows, options.jobs)
        rows = [
            await timed("stats", options.rows, deliveries.stats(federation.database, Selection()), profile),
            await timed("retry", 2 * options.jobs, bulk.retry(Selection(code=LATELY)), profile),
            await timed("drop", options.rows, bulk.drop(Selection()), profile),
        ]
        counts = await federation.delivery_queue.counts()
        # The failed jobs of retried deliveries stay on record: their rows name other jobs since then.
        left = sum(number for state, number in counts.items() if state is not JobState.FAILED)
        if left or await deliveries.count(federation.database, []):
            raise RuntimeError(f"{left} jobs are left, or rows are")
    finally:
        await federation.close()
    if profile is not None:
        profile.dump_stats(options.profile)
    return rows


async def timed(
    name: str, rows: int, command: Awaitable[object], profile: cProfile.Profile | None
) -> dict[str, float | str]:
    started, cpu = time.perf_counter(), time.process_time()
    if profile:
        profile.enable()
    await command
    if profile:
        profile.disable()
    return {"command": name, "rows": rows, "s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}


async def fill(federation: Federation, rows: int, jobs: int) -> None:
    """Make all the deliveries, and the jobs of those that have one."""
    now = datetime.now(UTC)
    for kind, first, last in (("old", 3 * jobs, rows), ("lately", 0, 2 * jobs), ("owed", 2 * jobs, 3 * jobs)):
        for start in range(first, last, AT_ONCE):
            made = await insert_rows(federation, kind, min(AT_ONCE, last - start), now)
            if kind == "owed" or (kind == "lately" and start < jobs):
                with_job = made if kind == "owed" else made[: jobs - start]
                await enqueue(federation, with_job)
            if kind == "lately":
                await fail(federation, min(jobs - start, len(made)))


async def insert_rows(federation: Federation, kind: str, count: int, now: datetime) -> list[dict[str, object]]:
    """Insert `count` more rows, in groups that share a text."""
    failed: dict[str, object] = {}
    if kind != "owed":
        code = LATELY if kind == "lately" else LONG_AGO
        failed = {
            "settled_at": now,
            "state": DeliveryState.FAILED,
            "outcome": "retryable",
            "last_error": "it failed",
            "error_code": code,
            "attempts": 5,
        }
    texts = [
        {"id": new_id(), "payload": "x" * 2_400, "refs": min(GROUP, count - start), "created_at": now}
        for start in range(0, count, GROUP)
    ]
    made: list[dict[str, object]] = [
        {
            "id": new_id(),
            "target_url": f"https://social-{number % GROUP}.example{PATH}",
            "payload": "",
            "created_at": now,
            "job_name": POST_JOB,
            "server_url": f"https://social-{number % GROUP}.example",
            "payload_id": texts[number // GROUP]["id"],
            **failed,
        }
        for number in range(count)
    ]
    async with federation.database.transaction() as session:
        connection = await session.connection()
        await connection.execute(insert(DeliveryPayload), texts)
        await connection.execute(insert(DeliveryJob), made)
    return made


async def enqueue(federation: Federation, rows: Sequence[dict[str, object]]) -> None:
    for start in range(0, len(rows), GROUP):
        await federation.delivery_queue.add_bulk(
            [
                delivery_job(
                    POST_JOB,
                    str(row["id"]),
                    target_url=str(row["target_url"]),
                    server_url=str(row["server_url"]),
                    payload_id=str(row["payload_id"]),
                )
                for row in rows[start : start + GROUP]
            ]
        )


async def fail(federation: Federation, count: int) -> None:
    """Let `count` of the waiting jobs fail for good."""
    storage, error = federation.delivery_queue.storage, ErrorInfo(type="RetryableFailure", message="it failed")
    while count > 0:
        claims = await storage.claim("bench", leases={ANY_NAME: MINUTE}, limit=min(GROUP, count))
        await storage.settle([Failed(claim=claim, error=error, keep=timedelta(days=7)) for claim in claims])
        count -= len(claims)


if __name__ == "__main__":
    main()
