"""How fast one worker process delivers, and what a delivery costs it.

    python scripts/bench_delivery.py [--queue sqlite|postgres|bullmq] [--servers 1 200] [--deliveries 4000]
        [--concurrency 50] [--tls] [--repeat 5] [--against COMMIT] [--profile DIRECTORY]

Every run gets a fresh database (and Valkey, and PostgreSQL), peers in another process that answer each delivery with a
canned, validly signed acknowledgment, and the worker in a third process. Half of the deliveries are follows, half
posts, of about 1.5 KB each. With `--tls` the peers speak TLS, with a certificate of an authority made for the run.

`--against COMMIT` measures the code of that commit, too. Both take turns, in one run, each time in the other order, so
that none has the machine's better hours; a ratio is the median of those of the runs side by side. Of a commit only the
packages are another's (`bench/trees.py`).

`database_ms_each` and `queue_ms_each` are the CPU of PostgreSQL and of Valkey. On SQLite both are 0, as that
is the worker's own.

`--profile DIRECTORY` also shows where the CPU time of a delivery goes, part by part, from samples of our worker's
stacks (`bench/sampling.py`), and writes these there, a file for each row: `flamegraph.pl`, inferno and speedscope read
them.

Prints a table on stderr and one JSON object on stdout. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.trees import Tree, measured_tree, trees

sys.path.insert(0, measured_tree())

from bench import sampling
from bench.deliveries import node_environment, own_keys
from bench.delivering import deliver_all
from bench.node import machine, unwind_when_terminated
from bench.peer_servers import Peers, peer_process
from bench.report import in_turn, ratios

LONGEST_RUN_SECONDS: Final = 600


def main() -> None:
    """Run the benchmark, or one of its child roles."""
    options = parse()
    unwind_when_terminated()
    if options.role:
        print(json.dumps(asyncio.run(deliver_all(profiled=options.profile is not None))))
    else:
        benchmark(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", nargs="+", default=["sqlite", "bullmq"], choices=["sqlite", "postgres", "bullmq"])
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 200])
    parser.add_argument("--deliveries", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--tls", action="store_true", help="see above")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each kind, interleaved; medians are shown")
    parser.add_argument("--against", metavar="COMMIT", help="see above")
    parser.add_argument("--profile", type=Path, metavar="DIRECTORY", help="see above")
    parser.add_argument("--role", choices=["worker"], help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the runs of a row have in common, whoever is measured."""

    queue: str
    servers: int

    @property
    def labels(self) -> dict[str, object]:
        """The columns that tell the kinds apart."""
        return {"queue": self.queue, "servers": self.servers}


@dataclass(slots=True)
class Entry:
    """A row of the table, with what its runs found; `tree` is whose code runs."""

    kind: Kind
    tree: Tree
    runs: list[dict[str, float]] = field(default_factory=list)
    folded: Counter[str] = field(default_factory=Counter)

    def measure(self, options: argparse.Namespace) -> None:
        """Run once more."""
        found = run_once(self.kind, self.tree, options)
        self.folded.update(found.pop("folded", {}))
        self.runs.append(found)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(run[name] for run in self.runs) for name in self.runs[0]}


def benchmark(options: argparse.Namespace) -> None:
    told: dict[str, object] = {"deliveries": options.deliveries, "concurrency": options.concurrency, **machine()}
    with trees(options.against) as measured:
        kinds = [Kind(queue=q, servers=s) for q, s in itertools.product(options.queue, options.servers)]
        groups = [[Entry(kind, tree) for tree in measured] for kind in kinds]
        for turn in range(options.repeat):
            for group in groups:
                for entry in in_turn(group, turn):
                    entry.measure(options)
    tell(groups, options, told, several=len(measured) > 1)


def tell(
    groups: Sequence[Sequence[Entry]], options: argparse.Namespace, told: Mapping[str, object], *, several: bool
) -> None:
    """Show tables on stderr, and print one JSON object."""
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    for group in groups:
        labels = group[0].kind.labels
        rows += [{**labels, **({"worker": e.tree.name} if several else {}), **e.medians()} for e in group]
        for other in group[1:]:
            names = f"{group[0].tree.name} / {other.tree.name}"
            compared.append({**labels, "worker": names, **ratios(group[0].runs, other.runs)})
    show(rows)
    if compared:
        show(compared)
    profiles = list(profile(groups, options)) if options.profile else []
    more: dict[str, object] = {"ratios": compared} if several else {}
    more |= {"profiles": profiles} if profiles else {}
    more |= {"tls": True} if options.tls else {}
    print(json.dumps({**told, **more, "rows": rows}))


def profile(groups: Sequence[Sequence[Entry]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write the stacks of each row of ours, show its parts, and yield these."""
    for entry in itertools.chain.from_iterable(groups):
        if not entry.folded:
            continue
        labels = {**entry.kind.labels, "worker": entry.tree.name}
        file = options.profile / f"{'-'.join(str(value).replace(' ', '-') for value in labels.values())}.folded"
        sampling.write_folded(entry.folded, file)
        parts, deliveries = sampling.by_part(entry.folded), options.deliveries * options.repeat
        print(f"\n{file}: a delivery's CPU time\n{sampling.table(parts, deliveries)}", file=sys.stderr)
        yield {**labels, "file": str(file), "us": {name: spent / deliveries for name, spent in parts.items()}}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = [columns, *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(16, *map(len, cells)) for cells in zip(*shown, strict=True)]
    for cells in shown:
        print(*(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), file=sys.stderr)


def _cell(value: object) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def run_once(kind: Kind, tree: Tree, options: argparse.Namespace) -> dict[str, Any]:
    """Run one worker on a fresh node, and return what it measured of itself.

    Exits if the worker fails, or if its deliveries did not all arrive.
    """
    with fresh_node(kind, options) as (directory, environment, peers):
        finished = subprocess.run(
            role_command(options),
            env={**environment, **tree.variables()},
            capture_output=True,
            check=False,
            timeout=LONGEST_RUN_SECONDS,
            cwd=directory,
        )
        if finished.returncode:
            tree.give_up(finished.stderr.decode())
        sys.stderr.write(finished.stderr.decode())
        if (taken := peers.tell("taken")) < options.deliveries:
            sys.exit(f"{tree.name}: only {taken} deliveries have arrived")
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


@contextlib.contextmanager
def fresh_node(kind: Kind, options: argparse.Namespace) -> Iterator[tuple[Path, dict[str, str], Peers]]:
    """Yield a directory, the settings of a fresh node, and the peers that it is to deliver to."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fd-bench-")))
        environment = stack.enter_context(node_environment(kind.queue))
        certificate = None
        if options.tls:
            certificate, authority = make_certificate(directory)
            environment["SSL_CERT_FILE"] = str(authority)
        peers = stack.enter_context(peer_process(kind.servers, own_keys(environment), certificate=certificate))
        environment["FEDERATION_DELIVERY_CONCURRENCY"] = str(options.concurrency)
        # The limit per server protects from slow ones; with one server, only the limit would be measured.
        environment["FEDERATION_PER_SERVER"] = str(options.concurrency)
        environment["BENCH_PEERS"] = json.dumps(peers.servers)
        environment["BENCH_DELIVERIES"] = str(options.deliveries)
        yield directory, environment, peers


def role_command(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--role", "worker"]
    return [*command, "--profile", str(options.profile)] if options.profile else command


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Write a certificate for the peers with its key, and that of the authority that vouches for them."""
    import trustme

    authority, certificate = trustme.CA(), directory / "peers.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(directory / "authority.pem"))
    return certificate, directory / "authority.pem"


if __name__ == "__main__":
    main()
