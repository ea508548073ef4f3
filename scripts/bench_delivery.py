"""How fast one worker process delivers, and what a delivery costs it.

    python scripts/bench_delivery.py [--queue sqlite|bullmq] [--servers 1 200] [--deliveries 4000] [--concurrency 50]
        [--processes 1 2] [--pages 0 10] [--fanout [RECIPIENTS]]

Every run gets a fresh database (and Valkey, and PostgreSQL), peers in another process that answer each delivery with a
canned, validly signed acknowledgment, and the worker in a third process. Half of the deliveries are follows, half
posts, of about 1.5 KB each.

`database_ms_each` and `queue_ms_each` are the CPU of PostgreSQL and of Valkey. On SQLite both are 0, as that
is the worker's own.

With `--processes` each run starts `federation workers run --processes N` instead, and measures it from outside,
from the moment when all processes are ready. `worker_cores` is how much of the machine they had, `other_cores` what
all else had: the peers, the servers, and other programs. On a machine without cores to spare, compare `cpu_ms_each`.

With `--pages` the worker serves the dashboard, too, and so many pages are open: half of the overview, half of the live
attempts. With `--pages 0 10 --repeat 5` runs with and without them take turns, and the difference is what they cost.

`--fanout` delivers nothing. It measures what it takes to owe one post of 2.4 KB to 20 000 servers, or as many as are
given, on BullMQ and PostgreSQL. The aim is at most 10 s, and 24 MB in Valkey.

Prints a table on stderr and one JSON object on stdout. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.deliveries import cpu_seconds, enqueue, is_owed, node_environment, own_keys, register
from bench.node import machine, unwind_when_terminated
from bench.peer_servers import peer_process
from bench.server_cpu import cpu_of


def main() -> None:
    """Run the benchmark, or one of its child roles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", nargs="+", default=["sqlite", "bullmq"], choices=["sqlite", "bullmq"])
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 200])
    parser.add_argument("--deliveries", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--processes", nargs="+", type=int, default=[], metavar="N", help="see above")
    parser.add_argument("--pages", nargs="+", type=int, default=[], metavar="N", help="see above")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each kind, interleaved; medians are shown")
    parser.add_argument("--fanout", nargs="?", type=int, const=20_000, metavar="RECIPIENTS", help="see above")
    parser.add_argument("--profile", type=Path, help="write a cProfile of the worker here")
    parser.add_argument("--role", choices=["worker"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pages and options.processes:
        parser.error("--pages is for one process: only there is the dashboard beside what delivers")
    unwind_when_terminated()

    if options.role == "worker":
        run_worker(options)
    elif options.fanout:
        benchmark_fan_out(options)
    else:
        benchmark(options)


def benchmark(options: argparse.Namespace) -> None:
    kinds = list(itertools.product(options.queue, options.servers, options.processes or [0], options.pages or [0]))
    results: dict[tuple[str, int, int, int], list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.repeat):
        for kind in kinds:
            results[kind].append(run_once(*kind, options))
    rows = [
        {
            "queue": queue,
            "servers": servers,
            **({"processes": number} if number else {}),
            **({"pages": pages} if options.pages else {}),
            **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
        }
        for (queue, servers, number, pages), runs in results.items()
    ]
    show(rows)
    print(json.dumps({"deliveries": options.deliveries, "concurrency": options.concurrency, **machine(), "rows": rows}))


def benchmark_fan_out(options: argparse.Namespace) -> None:
    from bench.fan_out import fan_out

    runs = []
    for _ in range(options.repeat):
        with contextlib.ExitStack() as stack:
            runs.append(fan_out(stack.enter_context(node_environment("bullmq")), options.fanout))
    row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    show([row])
    print(json.dumps({**machine(), "rows": [row]}))


def show(rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    print(*(f"{name:>16}" for name in columns), file=sys.stderr)
    for row in rows:
        print(
            *(f"{row[name]:>16}" if isinstance(row[name], str) else f"{row[name]:>16.6g}" for name in columns),
            file=sys.stderr,
        )


def run_once(queue: str, servers: int, processes: int, pages: int, options: argparse.Namespace) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fd-bench-"))
        environment = stack.enter_context(node_environment(queue))
        peers = stack.enter_context(peer_process(servers, own_keys(environment)))
        environment["FEDERATION_DELIVERY_CONCURRENCY"] = str(options.concurrency)
        # The limit per server protects from slow ones; with one server, only the limit would be measured.
        environment["FEDERATION_PER_SERVER"] = str(options.concurrency)
        environment["BENCH_PEERS"] = json.dumps(peers.servers)
        environment["BENCH_DELIVERIES"] = str(options.deliveries)
        command = [sys.executable, __file__, "--role", "worker"]
        if options.profile:
            command += ["--profile", str(options.profile)]
        if processes:
            command += ["--processes", str(processes)]
        if pages:
            command += ["--pages", str(pages)]
        finished = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, check=True, timeout=600, cwd=directory
        )
        result: dict[str, float] = json.loads(finished.stdout)
        return result


def run_worker(options: argparse.Namespace) -> None:
    """Fill a fresh queue, then measure how long the workers take to empty it."""
    if options.processes:
        from bench.several import deliver_in_several

        print(json.dumps(deliver_in_several(options.processes[0])))
    elif options.profile:
        import cProfile

        profile = cProfile.Profile()
        print(json.dumps(asyncio.run(deliver_all(profile, pages=sum(options.pages)))))
        profile.dump_stats(options.profile)
    else:
        print(json.dumps(asyncio.run(deliver_all(None, pages=sum(options.pages)))))


async def deliver_all(profile: Any, *, pages: int) -> dict[str, float]:
    from federation.app import Federation
    from federation.base.logs import configure_logging
    from federation.base.settings import Settings
    from federation.cli.running import upgrade
    from federation.node_workers import FederationWorkers
    from federation.process import set_aside_loaded

    configure_logging("warning")
    settings = Settings.from_values(os.environ)
    await asyncio.to_thread(upgrade, settings)
    federation = Federation(settings)
    peers, deliveries = json.loads(os.environ["BENCH_PEERS"]), int(os.environ["BENCH_DELIVERIES"])
    await register(federation, peers)
    await enqueue(federation, [peer["url"] for peer in peers], deliveries)

    workers = FederationWorkers(federation)
    async with watched(federation, pages):
        set_aside_loaded()
        servers = [cpu_of(os.environ["DATABASE_URL"]), cpu_of(os.environ.get("REDIS_URL", ""))]
        before = [each.seconds() for each in servers]
        started, cpu = time.perf_counter(), cpu_seconds()
        if profile:
            profile.enable()
        workers.start()
        left = True
        while left:
            await asyncio.sleep(0.05)
            left = await is_owed(federation)
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        database, queue = (each.seconds() - first for each, first in zip(servers, before, strict=True))
    if profile:
        profile.disable()
    await workers.stop()
    await federation.attempts.close()
    durations = await attempt_durations(federation)
    failed, held = await mishaps(federation)
    await federation.close()
    return {
        "deliveries_per_s": deliveries / seconds,
        "cpu_ms_each": cpu * 1000 / deliveries,
        "database_ms_each": database * 1000 / deliveries,
        "queue_ms_each": queue * 1000 / deliveries,
        "p50_ms": statistics.median(durations),
        "p99_ms": statistics.quantiles(durations, n=100)[98],
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "failed": failed,
        "held": held,
    }


@contextlib.asynccontextmanager
async def watched(federation: Any, pages: int) -> AsyncIterator[None]:
    """Serve the dashboard, with so many open pages; nothing for none."""
    if not pages:
        yield
        return
    from bench.pages import open_pages

    from federation.dashboard.node_site import NodeSite
    from workers.dashboard.access import Access

    site = NodeSite(federation, access=Access())
    try:
        async with open_pages(site, pages):
            yield
    finally:
        await site.close()


async def mishaps(federation: Any) -> tuple[int, int]:
    """Count the deliveries that failed, and the attempts made after a delivery had been held: both should be none."""
    from sqlalchemy import func, select
    from sqlmodel import col

    from db import DeliveryAttempt, DeliveryJob

    failed = (await federation.database.rows(select(func.count()).select_from(DeliveryJob)))[0][0]
    again = select(func.count()).select_from(DeliveryAttempt).where(col(DeliveryAttempt.series) > 0)
    return failed, (await federation.database.rows(again))[0][0]


async def attempt_durations(federation: Any) -> list[int]:
    from sqlalchemy import select
    from sqlmodel import col

    from db import DeliveryAttempt

    async with federation.database.read() as session:
        return list((await session.execute(select(col(DeliveryAttempt.duration_ms)))).scalars())


if __name__ == "__main__":
    main()
