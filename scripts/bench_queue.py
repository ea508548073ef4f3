"""How fast the queue core is on each storage, with 1 KiB payloads and handlers that do nothing.

    python scripts/bench_queue.py [--storage memory file sqlite postgres redis bullmq bull] [--jobs 10000]
        [--concurrency 50 10] [--backlog 0] [--repeat 3] [--peers [NAME ...]] [--peers-python PYTHON] [--wait]
        [--memory] [--against COMMIT] [--markdown]

Measures, in one process: jobs enqueued per second in batches of 500; jobs processed per second and the CPU time of one
job, with `--backlog` other jobs waiting behind; and, idle, the time from an enqueue to the start of its handler.
`--wait` adds the rate of `Queue.enqueue_and_wait` with 1, 10 and 100 waiters and the worker in the same process,
`--memory` what a waiting job takes in Valkey. Several values of `--backlog` are compared with the first: "times
slower".

`--concurrency` without a value leaves only what these two add.

`--peers` measures other queues in the same run and compares each with our storage on the same server: arq, saq,
procrastinate and pgqueuer, which need an environment of their own (`bench/peers.py` says how to make it), the `bullmq`
package's own worker, and Node's `bull` 1.x, which needs Node. Their settings are in `bench/peer_process.py` and
`bench/node_bull.mjs`.

`--against COMMIT` measures everything with the code of that commit, too, in turns with this checkout's, each time in a
process of its own. Under each such pair stands the ratio, the median of those of the runs side by side
(`bench/trees.py` says what is another's).

Every run gets a fresh queue on a fresh server; kinds are interleaved and medians of `--repeat` runs shown: tables on
stderr, one JSON object on stdout; with `--markdown` the tables on stdout instead. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from bench.trees import Tree, measured_tree, trees

sys.path.insert(0, measured_tree())

from bench import ours, ours_process, peers, storages
from bench.node import machine, unwind_when_terminated
from bench.report import Row, by_table, in_turn, markdown, with_ratios


def main() -> None:
    """Run the benchmark."""
    options = parse()
    unwind_when_terminated()
    others = [] if options.peers is None else peers.installed(options.peers or list(peers.PEERS), options.peers_python)
    own = [*throughput_rows(options, others), *extra_rows(options)]
    with trees(options.against) as measured:
        groups = [of_trees(row, measured) for row in own]
        for turn in range(options.repeat):
            for group in groups:
                for row in in_turn(group, turn):
                    row.runs.append(asyncio.run(row.measure()))
                    gc.collect()
    rows = [row for group in groups for row in with_ratios(group)]
    versions = {**storages.versions(options.storage), **{peer.name: peer.version for peer in others}}
    told = {"jobs": options.jobs, "repeat": options.repeat, **machine(), **versions}
    print(f"{markdown(rows)}\n\n{told}", file=sys.stdout if options.markdown else sys.stderr)
    if not options.markdown:
        print(json.dumps({**told, "tables": by_table(rows)}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", nargs="+", default=storages.STORAGES, choices=storages.STORAGES)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--concurrency", nargs="*", type=int, default=[50, 10])
    parser.add_argument("--backlog", nargs="+", type=int, default=[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, help="all of them, or these")
    parser.add_argument("--peers-python", metavar="PYTHON", help="the interpreter of an environment with `.[bench]`")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--against", metavar="COMMIT", help="see above")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.against and options.peers is not None:
        parser.error("--against compares our own code, and --peers other queues with it")
    return options


def of_trees(row: Row, measured: Sequence[Tree]) -> list[Row]:
    """Return the row, or with several trees one for each."""
    if len(measured) == 1:
        return [row]
    return [
        replace(
            row,
            labels={**row.labels, "code": tree.name},
            measure=partial(ours_process.measured, tree, row.measure.func, *row.measure.args),
            baseline=None,
            runs=[],
        )
        for tree in measured
    ]


def throughput_rows(options: argparse.Namespace, others: list[peers.Peer]) -> Iterator[Row]:
    """Yield our storages, each followed by the peers on the same server."""
    table = f"{options.jobs} jobs"
    for storage in options.storage:
        for concurrency in options.concurrency:
            mine = list(backlog_rows(options, table, storage, concurrency))
            yield from mine
            for peer in others:
                if peer.storage == storage:
                    yield Row(
                        table=table,
                        labels={"queue": f"{peer.name} {peer.version}", "concurrency": concurrency},
                        measure=partial(peer.throughput, concurrency, options.jobs),
                        baseline=mine[0],
                    )


def backlog_rows(options: argparse.Namespace, table: str, storage: str, concurrency: int) -> Iterator[Row]:
    first = None
    for backlog in options.backlog:
        labels = {"queue": storage, "concurrency": concurrency} | ({"backlog": backlog} if any(options.backlog) else {})
        measure = partial(ours.throughput, storage, concurrency, backlog, options.jobs)
        row = Row(table=table, labels=labels, measure=measure, baseline=first)
        first = first or row
        yield row


def extra_rows(options: argparse.Namespace) -> Iterator[Row]:
    if options.wait:
        for storage in options.storage:
            yield Row(table="enqueue_and_wait", labels={"queue": storage}, measure=partial(ours.waiting, storage))
    if options.memory:
        yield Row(table="memory of a waiting job", labels={"queue": "redis"}, measure=partial(ours.memory))


if __name__ == "__main__":
    main()
