"""What servers that hang for ever cost the others.

Both runs owe the same deliveries to the same servers. Speed means the deliveries to the nine tenths that are healthy in
both, from the start of the workers until the last of these. `of_all_without` compares it with the speed of all
deliveries of the run without hanging servers, which nine tenths can reach only if a hanging one costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import func, select
from sqlmodel import col

from bench.deliveries import cpu_seconds, enqueue, node_environment, own_keys, register
from bench.outage.figure import Figure
from bench.peer_servers import peer_process
from db import AttemptOutcome, DeliveryAttempt, DeliveryJob
from federation.base.logs import configure_logging
from federation.base.settings.settings import Settings
from federation.cli.running import upgrade
from federation.runtime.composition import Federation
from federation.runtime.nodes import set_aside_loaded
from federation.runtime.workers import FederationWorkers

HANGING_PART: Final = 10
"""One of this many servers hangs."""
EACH: Final = 4
"""How many deliveries go to each server."""
LONGEST_RUN: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What one pair of runs has in common. `known` says that the servers are registered, and not discovered first."""

    queue: str
    concurrency: int
    known: bool
    servers: int

    @property
    def labels(self) -> dict[str, object]:
        kind = "known" if self.known else "unknown"
        return {"queue": self.queue, "concurrency": self.concurrency, "servers": f"{self.servers} {kind}"}


def measure(worlds: list[World], *, repeat: int) -> Iterator[Figure]:
    """Measure with and without hanging servers, in each world; yield figures of the medians.

    Runs with and without them alternate, and so do the worlds.
    """
    runs: dict[tuple[World, bool], list[dict[str, float]]] = {}
    for _ in range(repeat):
        for world in worlds:
            for hangs in (False, True):
                runs.setdefault((world, hangs), []).append(_run(world, hangs=hangs))
    for world in worlds:
        well, sick = (_medians(runs[world, hangs]) for hangs in (False, True))
        healthy_part = 1 - _hanging(world.servers) / world.servers
        told = (
            "healthy_per_s",
            "seconds_to_95_percent",
            "cpu_s",
            "attempts_that_hung",
            "healthy_held",
            "healthy_failed",
        )
        yield Figure(
            name="speed to the same healthy servers, 10 % hanging",
            labels=world.labels,
            value=sick["healthy_per_s"] / (well["healthy_per_s"] * healthy_part),
            bar=0.9,
            has_to_be="at least",
            details={"of_all_without": sick["healthy_per_s"] / well["healthy_per_s"]}
            | {name: sick[name] for name in told}
            | {f"without_{name}": well[name] for name in told[:3]},
        )
        yield Figure(
            name="p95 of the healthy, 10 % hanging",
            labels=world.labels,
            value=sick["p95_ms"] / well["p95_ms"],
            bar=1.2,
            has_to_be="at most",
            details={"p95_ms": sick["p95_ms"], "without_p95_ms": well["p95_ms"]},
        )


def _hanging(servers: int) -> int:
    return max(servers // HANGING_PART, 1)


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _run(world: World, *, hangs: bool) -> dict[str, float]:
    """Run in a separate worker process, which is killed as soon as the healthy servers have everything."""
    hanging = _hanging(world.servers) if hangs else 0
    with (
        node_environment(world.queue) as environment,
        peer_process(world.servers, own_keys(environment), hanging=hanging) as peers,
    ):
        environment["FEDERATION_DELIVERY_CONCURRENCY"] = str(world.concurrency)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        task = {"peers": peers.servers, "hanging": hanging, "known": world.known}
        finished = subprocess.run(
            [sys.executable, "-m", "bench.outage.hanging"],
            input=json.dumps(task),
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            timeout=LONGEST_RUN.total_seconds() + 120,
        )
    result: dict[str, float] = json.loads(finished.stdout)
    print(f"{world.labels} hanging={hanging}: {result}", file=sys.stderr)
    return result


async def _deliver(peers: list[dict[str, str]], *, hanging: int, known: bool) -> dict[str, float]:
    """Start the workers on a full queue, and measure what the healthy servers get until they have everything."""
    settings = Settings.from_values(os.environ)
    await asyncio.to_thread(upgrade, settings)
    federation = Federation(settings)
    if known:
        await register(federation, peers)
    # In a fixed, mixed order: the last peers hang, and deliveries to them should come up all the time.
    mixed = [peers[(number * 7919) % len(peers)]["url"] for number in range(len(peers))]
    urls = mixed if len(set(mixed)) == len(peers) else [peer["url"] for peer in peers]
    await enqueue(federation, urls, EACH * len(peers), follows=False)
    sick = [peer["url"] for peer in peers[len(peers) - hanging :]] if hanging else []
    workers = FederationWorkers(federation)
    set_aside_loaded()
    began, cpu = datetime.now(UTC), cpu_seconds()
    workers.start()
    await _until_done(federation, EACH * (len(peers) - hanging), began)
    cpu = cpu_seconds() - cpu
    return {**await _seen(federation, sick, began), "cpu_s": cpu}


async def _until_done(federation: Federation, healthy: int, began: datetime) -> None:
    """Wait until it is done, with a query that costs the same with hanging servers and without."""
    delivered = select(func.count()).where(col(DeliveryAttempt.outcome) == AttemptOutcome.DELIVERED)
    while (await federation.database.rows(delivered))[0][0] < healthy:
        if datetime.now(UTC) - began > LONGEST_RUN:
            return  # the figures show it
        await asyncio.sleep(0.25)


async def _seen(federation: Federation, sick: list[str], began: datetime) -> dict[str, float]:
    attempt = DeliveryAttempt
    columns = select(
        col(attempt.started_at),
        col(attempt.duration_ms),
        col(attempt.outcome),
        col(attempt.series),
        col(attempt.server_url),
    )
    rows = await federation.database.rows(columns)
    healthy = [row for row in rows if row.server_url not in set(sick)]
    delivered = [row for row in healthy if row.outcome == AttemptOutcome.DELIVERED]
    ends = [(row.started_at - began).total_seconds() + row.duration_ms / 1000 for row in delivered]
    failed = await federation.database.rows(
        select(func.count()).select_from(DeliveryJob).where(col(DeliveryJob.server_url).not_in(sick))
    )
    return {
        "healthy_per_s": len(delivered) / max(ends),
        "p95_ms": statistics.quantiles([row.duration_ms for row in delivered], n=20)[18],
        "seconds": max(ends),
        "seconds_to_95_percent": statistics.quantiles(ends, n=20)[18],
        "healthy_held": sum(1 for row in delivered if row.series),
        "healthy_retried": len(healthy) - len(delivered),
        "healthy_failed": failed[0][0],
        "attempts_that_hung": len(rows) - len(healthy),
    }


if __name__ == "__main__":
    configure_logging("critical")
    task = json.load(sys.stdin)
    work = _deliver(task["peers"], hanging=task["hanging"], known=task["known"])
    print(json.dumps(asyncio.run(work)), flush=True)
