"""What strangers cost a node: a flood of bad requests against a real process on SQLite, on loopback.

    python scripts/bench_strangers.py [--figure flood cost bodies] [--rate 200] [--seconds 60] [--offered 50] [--check]

Figures:
- `flood`: bad requests from 50 addresses of 127.0.0.0/8, three small ones for each large one. Meanwhile it measures p95
  and losses of good follows at 10/s, growth of the process's resident memory, and its deliveries, against the same time
  without a flood. `--offered` deliveries a second are owed; more than it can deliver show how fast it is;
- `cost`: the process's CPU for each kind of refused request, against that of a good follow and 20 ms for each MiB;
- `bodies`: growth of its resident memory while `--at-once` bodies of 4 MB come at the same moment.

Prints a table on stderr and one JSON object on stdout. With `--check` the exit status is 1 if a bar is missed. Needs
the `dev` extra, and Linux, whose `/proc` shows what a process uses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.node import machine, unwind_when_terminated
from bench.strangers import bodies, costs, measure

FIGURES: Final = ("flood", "cost", "bodies")


def main() -> None:
    """Measure the chosen figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", nargs="+", default=FIGURES, choices=FIGURES)
    parser.add_argument("--rate", type=float, default=200, help="bad requests a second")
    parser.add_argument("--seconds", type=float, default=60, help="how long, with the flood and without")
    parser.add_argument("--offered", type=float, default=50, help="deliveries owed a second")
    parser.add_argument("--requests", type=int, default=50, help="of each kind, for their cost")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--at-once", type=int, default=14, help="large bodies")
    options = parser.parse_args()
    unwind_when_terminated()

    figures = []
    if "flood" in options.figure:
        figures += asyncio.run(measure(rate=options.rate, seconds=options.seconds, offered=options.offered))
    if "cost" in options.figure:
        figures += asyncio.run(costs(requests=options.requests))
    if "bodies" in options.figure:
        figures += asyncio.run(bodies(at_once=options.at_once))
    for figure in figures:
        print(figure.line(), file=sys.stderr)
    print(json.dumps({**machine(), "figures": [figure.to_json() for figure in figures]}))
    if options.check and not all(figure.is_met for figure in figures):
        sys.exit(1)


if __name__ == "__main__":
    main()
