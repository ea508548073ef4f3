"""What grows with the number of servers, deliveries and attempts: bytes, statements, purges, memory; and four shards.

    python scripts/bench_scale.py [--figure growth log memory shards] [--place postgres sqlite]
        [--size 1000:10000:100000 10000:100000:1000000 ...] [--attempts 1000000]

`growth` fills a fresh node for each `--size`, which is `servers:held:attempts`. A fifth of the servers is down, and all
that is held is held for these; a tenth as many deliveries are ready, and as many failed. It measures the bytes of each
row, and what the statements of workers, of the scheduler, of operators and of their pages cost.

`log` makes the log of `--attempts` attempts in several ways, and measures the writing, and the purge of one day of
thirty-one: as it is, with BRIN for the index on time, and in partitions by day.

`memory` measures what a waiting job takes in Valkey, and what a process remembers of 10 000 and of 100 000 servers.

`shards` spreads deliveries over four queues by their servers, with a worker process for each: on four Valkey servers,
on a Redis Cluster of four, and on PostgreSQL. In the middle one of the servers is killed, and comes back.

Prints tables on stderr and one JSON object on stdout. Needs the `dev` extra. Set TMPDIR to a directory with room.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.node import fresh_places, machine, made_node, unwind_when_terminated
from bench.scale_rows import Size

from federation.base.logs import configure_logging

FIGURES = ("growth", "log", "memory", "shards")
SIZES = ("1000:10000:100000", "10000:100000:1000000")


def main() -> None:
    """Measure what is asked for."""
    options = parse()
    configure_logging("error")
    unwind_when_terminated()
    found: dict[str, object] = {}
    for figure in options.figure:
        tell(f"{figure}:")
        found[figure] = {"growth": growth, "log": log, "memory": memory, "shards": shards}[figure](options)
    print(json.dumps({**machine(), "load": round(os.getloadavg()[0], 1), **found}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", nargs="+", default=FIGURES, choices=FIGURES)
    parser.add_argument("--place", nargs="+", default=("postgres", "sqlite"), choices=("postgres", "sqlite"))
    parser.add_argument("--size", nargs="+", type=Size.parse, default=[Size.parse(each) for each in SIZES])
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=20_000, help="how many jobs wait, or go through four shards")
    parser.add_argument("--servers", type=int, default=100_000, help="how many servers a process hears of")
    parser.add_argument("--shards", nargs="+", default=("valkey", "cluster", "postgres"))
    return parser.parse_args()


def growth(options: argparse.Namespace) -> object:
    from bench.scale_growth import grown

    results = []
    for size in options.size:
        for place in options.place:
            tell(f"{place}, {size}: ms, ms of CPU here, ms of CPU of the server")
            with fresh_places(place) as values:
                results.append(asyncio.run(grown(place, made_node(values), size, tell)))
    return results


def log(options: argparse.Namespace) -> object:
    from bench.scale_log import compared

    with fresh_places("postgres") as values:
        return compared(made_node(values), options.attempts, tell)


def memory(options: argparse.Namespace) -> object:
    from bench.scale_memory import of_process, of_waiting_jobs

    with fresh_places("sqlite") as values:
        process = asyncio.run(of_process(made_node(values), options.servers, tell))
    return {"waiting": of_waiting_jobs(options.jobs, tell), "process": process}


def shards(options: argparse.Namespace) -> object:
    from bench.scale_shards import spread

    return [asyncio.run(spread(kind, options.jobs, options.servers, tell)) for kind in options.shards]


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
