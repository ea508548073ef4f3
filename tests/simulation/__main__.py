"""`scripts/simulate`: more worlds than the tests have time for."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from federation.runtime.nodes import set_aside_loaded
from tests.simulation.run import Verdict, run_seed

SEEDS, SERVERS = 10_000, 20
TOLD_EACH = 50
LARGE_SEEDS, LARGE_SERVERS = 20, 1_000


def main() -> int:
    """The command: 1 if a seed found something."""
    options = _options()
    if options.seed is not None:
        verdict = run_seed(
            options.seed,
            options.servers or SERVERS,
            tell=options.story,
            plain=options.plain,
            activities=options.activities,
        )
        print(verdict if verdict.findings or options.story else f"seed {options.seed}: {verdict.owed} deliveries, well")
        return bool(verdict.findings)
    chosen = options.seeds is not None or options.servers is not None
    seeds, servers = options.seeds or SEEDS, options.servers or SERVERS
    found = _run(_verdicts(range(options.first, options.first + seeds), servers, options))
    if not chosen:
        found += _run(_verdicts(range(LARGE_SEEDS), LARGE_SERVERS, options))
    return bool(found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Runs the delivery code through simulated weeks of outages. Without options: "
        f"{SEEDS} worlds of {SERVERS} servers, and {LARGE_SEEDS} of {LARGE_SERVERS}.",
    )
    parser.add_argument("--seeds", type=int, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--servers", type=int, help="servers of each")
    parser.add_argument("--seed", type=int, help="this world alone; prints its story if something is wrong")
    parser.add_argument("--story", action="store_true", help="with --seed: print the story in any case")
    parser.add_argument("--rush", type=int, default=1, help="each so-manieth world has a rush, too; 1: all")
    parser.add_argument("--plain", action="store_true", help="posts go by another wire, which has no keys")
    parser.add_argument("--activities", action="store_true", help="half of the servers are of the fediverse")
    parser.add_argument("--processes", type=int, default=2, help="worlds at once")
    return parser.parse_args()


def _run(verdicts: Iterator[Verdict]) -> int:
    """How many seeds found something; each is printed, and at last what all came to."""
    tally = Tally()
    for verdict in verdicts:
        tally.add(verdict)
        if verdict.findings:
            print(verdict, end="\n\n", flush=True)
        if tally.worlds % TOLD_EACH == 0:
            print(tally, file=sys.stderr, flush=True)
    print(f"`scripts/simulate {' '.join(sys.argv[1:])}`".replace(" `", "`"), tally, sep=": ", flush=True)
    return len(tally.failed)


@dataclass(slots=True)
class Tally:
    """What some worlds came to, in a line."""

    first: int | None = None
    last: int = 0
    servers: int = 0
    worlds: int = 0
    owed: int = 0
    hours: float = 0.0
    cpu_seconds: float = 0.0
    failed: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, verdict: Verdict) -> None:
        self.first = verdict.seed if self.first is None else self.first
        self.last, self.servers = verdict.seed, verdict.servers
        self.worlds += 1
        self.owed += verdict.owed
        self.hours += verdict.hours
        self.cpu_seconds += verdict.cpu_seconds
        self.failed += [verdict.seed] if verdict.findings else []

    def __str__(self) -> str:
        failed = f"{len(self.failed)} failed (seeds {', '.join(map(str, self.failed))})" if self.failed else "0 failed"
        return (
            f"{self.worlds} worlds of {self.servers} servers (seeds {self.first} to {self.last}),"
            f" {self.hours:.0f} simulated hours, {self.owed} deliveries, {failed};"
            f" {self.cpu_seconds / max(self.worlds, 1):.2f} s of CPU each,"
            f" {(time.monotonic() - self.started) / 3600:.2f} h in all"
        )


def _verdicts(seeds: range, servers: int, options: argparse.Namespace) -> Iterator[Verdict]:
    # Forks, also from Python 3.14 on: other processes would not find what is defined in a package's `__main__`.
    forks = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.processes, mp_context=forks, initializer=set_aside_loaded) as pool:
        yield from pool.map(
            partial(_verdict, servers=servers, rush=options.rush, plain=options.plain, activities=options.activities),
            seeds,
        )


def _verdict(seed: int, *, servers: int, rush: int, plain: bool, activities: bool) -> Verdict:
    return run_seed(seed, servers, rush=seed % rush == 0, plain=plain, activities=activities)


if __name__ == "__main__":
    sys.exit(main())
