"""What other servers' outages cost, and how soon after them everything is delivered: real processes on loopback.

    python scripts/bench_outage.py [--figure hanging held return] [--queue sqlite|bullmq] [--concurrency 10 50]
        [--servers 1000] [--scale 0.01] [--repeat 3] [--check]

Figures:
- `hanging`: speed and p95 of deliveries to healthy servers while a tenth of all servers hangs for ever, against the
  same run with none hanging, to servers that are known and to servers that are discovered first;
- `held`: how much the queues are asked in a minute with 100 000 deliveries held, against a minute with none;
- `return`: how soon the return of a server that was away for an hour is noticed, and it has the 10 000 held for it.

Prints a table on stderr and one JSON object on stdout. `--scale` makes everything smaller, for a trial. With `--check`
the exit status is 1 if a bar is missed. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.node import machine, unwind_when_terminated
from bench.outage import hanging, held, returned
from bench.outage.figure import Figure


def main() -> None:
    """Measure the chosen figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", nargs="+", default=["all"], choices=["all", *FIGURES])
    parser.add_argument("--queue", nargs="+", default=["sqlite", "bullmq"], choices=["sqlite", "bullmq"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[10, 50])
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--kind", nargs="+", default=["known", "unknown"], choices=["known", "unknown"])
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts and times, for a trial")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind, interleaved; medians count")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    unwind_when_terminated()

    names = list(FIGURES) if "all" in options.figure else options.figure
    figures: list[Figure] = []
    for name in names:
        for figure in FIGURES[name](options):
            print(figure.line(), file=sys.stderr)
            figures.append(figure)
    print(json.dumps({**machine(), "scale": options.scale, "figures": [figure.to_json() for figure in figures]}))
    if options.check and not all(figure.is_met for figure in figures):
        sys.exit(1)


def _hanging(options: argparse.Namespace) -> Iterator[Figure]:
    worlds = [
        hanging.World(
            queue=queue,
            concurrency=concurrency,
            known=kind == "known",
            servers=_scaled(options.servers, options),
        )
        for queue in options.queue
        for concurrency in options.concurrency
        for kind in options.kind
    ]
    return hanging.measure(worlds, repeat=options.repeat)


def _held(options: argparse.Namespace) -> Iterator[Figure]:
    servers = _scaled(1_000, options)
    each = _scaled(100_000, options) // servers
    for queue in options.queue:
        yield held.measure(queue, held=each * servers, servers=servers, during=MINUTE * options.scale)


def _return(options: argparse.Namespace) -> Iterator[Figure]:
    next_look = None if options.scale == 1 else timedelta(minutes=2.5) * options.scale
    for queue in options.queue:
        yield from returned.measure(queue, held=_scaled(10_000, options), next_look=next_look)


def _scaled(count: int, options: argparse.Namespace) -> int:
    return max(round(count * options.scale), 10)


FIGURES: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "hanging": _hanging,
    "held": _held,
    "return": _return,
}
MINUTE = timedelta(minutes=1)


if __name__ == "__main__":
    main()
