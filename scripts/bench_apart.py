"""How fast a queue is as users run it: the producer and the worker in processes of their own, with default settings.

    python scripts/bench_apart.py [--systems redis bullmq node-bullmq bull node-bull ...] [--jobs 10000]
        [--concurrency 50 10] [--repeat 7] [--against COMMIT]
        [--peers-python PYTHON] [--markdown]

Each measurement has a fresh server, a producer process and a worker process, ours or a peer's:

- *enqueued*: jobs per second that one caller adds one after the other, each when the one before is acknowledged;
- *in bulk*: jobs per second that it adds 500 at a time;
- *processed*: jobs per second that the worker completes of `--jobs` that wait, from the first start to the last end;
- *worker CPU* and *server CPU*: processor time per job while it does so;
- *idle p50*: milliseconds from an enqueue in one process to the start of the handler in the other, with nothing to do.

Payloads are 1 KB. Completed jobs are kept for an hour by both sides, as our default is. Systems are measured in turn
and the medians of `--repeat` rounds are shown: tables on stderr, one JSON object on stdout; with `--markdown` the
tables on stdout instead. Node's systems need Node, and those of other queues for Python on PostgreSQL an environment
with them (Oban wants Python 3.12); the `dev` extra brings the servers.

`--against COMMIT` measures our systems with the code of that commit, too, in turns with this checkout's. Under each
such pair stands the ratio, the median of those of the runs side by side (`bench/trees.py` says what is another's).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from bench.trees import Tree, measured_tree, trees

sys.path.insert(0, measured_tree())

from bench import apart
from bench.node import machine, unwind_when_terminated
from bench.report import Row, by_table, in_turn, markdown, with_ratios


def main() -> None:
    """Run the benchmark."""
    options = parse()
    unwind_when_terminated()
    apart.install(options.systems)
    versions = apart.versions(options.systems, options.peers_python)
    with trees(options.against) as measured:
        groups = list(rows_to_compare(options, measured))
        for turn in range(options.repeat):
            for group in groups:
                for row in in_turn(group, turn):
                    row.runs.append(asyncio.run(row.measure()))
    rows = [row for group in groups for row in with_ratios(group)]
    told = {"jobs": options.jobs, "repeat": options.repeat, **machine(), **versions}
    print(f"{markdown(rows)}\n\n{told}", file=sys.stdout if options.markdown else sys.stderr)
    if not options.markdown:
        print(json.dumps({**told, "tables": by_table(rows)}))


def rows_to_compare(options: argparse.Namespace, measured: Sequence[Tree]) -> Iterator[list[Row]]:
    """Yield the rows of each system, which take turns: of ours one for each tree."""
    for concurrency in options.concurrency:
        for system in options.systems:
            own = apart.SYSTEMS[system].is_ours
            yield [
                Row(
                    table=f"producer and worker apart, concurrency {concurrency}",
                    labels={"queue": system, **({"code": tree.name} if own and len(measured) > 1 else {})},
                    measure=partial(apart.measured, system, concurrency, options.jobs, options.peers_python, tree),
                )
                for tree in (measured if own else measured[:1])
            ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=apart.WITHOUT_PEERS_PYTHON, choices=list(apart.SYSTEMS))
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[50, 10])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--peers-python", metavar="PYTHON", default=sys.executable, help="has pgqueuer and Oban")
    parser.add_argument("--against", metavar="COMMIT", help="see above")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
