"""`scripts/simulate`: more worlds than the tests have time for."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from federation.process import set_aside_loaded
from tests.simulation.run import Verdict, run_seed

SEEDS, SERVERS = 10_000, 20
LARGE_SEEDS, LARGE_SERVERS = 20, 1_000


def main() -> int:
    """The command: 1 if a seed found something."""
    options = _options()
    if options.seed is not None:
        verdict = run_seed(options.seed, options.servers or SERVERS, tell=options.story)
        print(verdict if verdict.findings or options.story else f"seed {options.seed}: {verdict.owed} deliveries, well")
        return bool(verdict.findings)
    chosen = options.seeds is not None or options.servers is not None
    seeds, servers = options.seeds or SEEDS, options.servers or SERVERS
    found = _run(seeds, servers, options.processes)
    if not chosen:
        found += _run(LARGE_SEEDS, LARGE_SERVERS, options.processes)
    return bool(found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Runs the delivery code through simulated weeks of outages. Without options: "
        f"{SEEDS} worlds of {SERVERS} servers, and {LARGE_SEEDS} of {LARGE_SERVERS}.",
    )
    parser.add_argument("--seeds", type=int, help="how many worlds")
    parser.add_argument("--servers", type=int, help="servers of each")
    parser.add_argument("--seed", type=int, help="this world alone; prints its story if something is wrong")
    parser.add_argument("--story", action="store_true", help="with --seed: print the story in any case")
    parser.add_argument("--processes", type=int, default=2, help="worlds at once")
    return parser.parse_args()


def _run(seeds: int, servers: int, processes: int) -> int:
    """How many seeds found something; each is printed."""
    started, failed, owed = time.monotonic(), 0, 0
    for number, verdict in enumerate(_verdicts(seeds, servers, processes), 1):
        owed += verdict.owed
        if verdict.findings:
            failed += 1
            print(verdict, end="\n\n", flush=True)
        if number % 100 == 0 or number == seeds:
            seconds = time.monotonic() - started
            print(
                f"{number} worlds of {servers} servers, {owed} deliveries, {failed} failed, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return failed


def _verdicts(seeds: int, servers: int, processes: int) -> Iterator[Verdict]:
    with ProcessPoolExecutor(processes, initializer=set_aside_loaded) as pool:
        yield from pool.map(partial(run_seed, servers=servers), range(seeds))


if __name__ == "__main__":
    sys.exit(main())
