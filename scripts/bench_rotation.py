"""How long it takes to bring a node's new keys to every server it knows: `federation keys rotate` on loopback.

    python scripts/bench_rotation.py [--place sqlite postgres] [--servers 2000] [--kill-after SECONDS] [--check]

The servers are one other process, which does all that the protocol asks of them. With `--kill-after` the command is
killed by `kill -9` after that many seconds, and run again; in the end every server has to know the new keys.

Prints a table on stderr and one JSON object on stdout, with the load of the machine. With `--check` the exit status is
1 if the bar is missed. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.node import machine, unwind_when_terminated
from bench.rotation import measure


def main() -> None:
    """Measure at each place asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", nargs="+", default=["sqlite"], choices=["sqlite", "postgres"])
    parser.add_argument("--servers", type=int, default=2000)
    parser.add_argument("--kill-after", type=float, metavar="SECONDS", help="kill -9 each run after so long")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bar is missed")
    parser.add_argument("--profile", type=Path, help="write a cProfile of the command here")
    options = parser.parse_args()
    unwind_when_terminated()

    kill_after = None if options.kill_after is None else timedelta(seconds=options.kill_after)
    load = os.getloadavg()[0]
    figures = []
    for place in options.place:
        figures.append(measure(place, servers=options.servers, kill_after=kill_after, profile=options.profile))
        print(figures[-1].line(), file=sys.stderr)
    print(json.dumps({**machine(), "load": round(load, 1), "figures": [figure.to_json() for figure in figures]}))
    if options.check and not all(figure.is_met for figure in figures):
        sys.exit(1)


if __name__ == "__main__":
    main()
