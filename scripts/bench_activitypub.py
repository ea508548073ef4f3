"""How fast one worker process sends activities, what each costs it, and how Fedify does beside it.

    python scripts/bench_activitypub.py [--contenders sqlite bullmq fedify sealed-sqlite sealed-bullmq] [--each 10]
        [--servers 200] [--concurrency 50] [--hang 10] [--send 20000] [--receive 60] [--repeat 3]
        [--against COMMIT] [--profile DIRECTORY] [--markdown]

Every run sends `--each` new activities, the Create of a note of 2.4 KB, to the shared inboxes of `--servers` peers in
another process, which answer 202 and verify nothing. All are owed before the clock starts; some were sent before. Both
sides sign with RSA of 2048 bits, by draft-cavage. Ours is a worker on SQLite, or on BullMQ and PostgreSQL, with a fresh
node. Fedify has its queue in its own process, with as many workers as ours has slots, stores nothing, and adds no proof
to a delivery; it needs npm. `sealed-` is our worker that sends posts of this size by the sealed wire. CPU is that of
the worker, the database and the queue's server.

`--hang N`: the same runs, and others in which the last N peers accept connections and never answer. The speed is that
of deliveries to the others. A run that takes longer than a minute is cut off there.

`--send N`: what it takes to owe an activity to N inboxes, beside `enqueue_fanout` of a post to as many servers, each in
a transaction of its own, in turns.

`--receive N`: how fast a node takes activities, N of each of 50 actors over `--concurrency` connections; they were
signed by draft-cavage before the clock starts, and the actors' keys are known. Ours is `federation node serve`, which
verifies each and commits it with its job; Fedify verifies it and puts it into its queue in the process. Nobody works
them off.
With `--hang N` N others name keys of a server that never answers, all the time.

`--against COMMIT` measures our contenders with the code of that commit, too (`bench/trees.py`), `--profile` shows where
our worker's CPU time goes (`bench/sampling.py`). Contenders take turns, and medians of `--repeat` runs are shown:
tables on stderr, one JSON object on stdout; with `--markdown` the tables on stdout instead. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.trees import HERE, Tree, measured_tree, trees
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

sys.path.insert(0, measured_tree())

from bench import receiving, sampling, sending
from bench.deliveries import node_environment, own_keys
from bench.node import machine, unwind_when_terminated
from bench.peer_servers import OWN_URL, peer_process
from bench.report import Ratio, Row, by_table, in_turn, markdown

from tests.interop.activitypub.peer import HERE as INTEROP
from tests.interop.activitypub.peer import NODE
from tests.interop.peer import install_npm_packages
from tests.servers import free_port

CONTENDERS: Final = ("sqlite", "bullmq", "fedify", "sealed-sqlite", "sealed-bullmq")
FEDIFY: Final = "fedify"
BENCH: Final = Path(__file__).parent / "bench"
WARM: Final = 5
"""So many go to each peer before: V8 compiles what is hot, and connections are open."""
LIMIT_SECONDS: Final = 60
LONGEST_RUN_SECONDS: Final = 300
SIGNATURES: Final = 300


def main() -> None:
    """Run the benchmark, or our worker."""
    options = parse()
    unwind_when_terminated()
    if options.role:
        sending.run(json.load(sys.stdin), profiled=options.profile is not None)
        return
    told = {"each": options.each, "concurrency": options.concurrency, "repeat": options.repeat, **machine()}
    told |= {"signature_ms": signature_ms(), "cryptography": importlib.metadata.version("cryptography")}
    told |= install_fedify() if FEDIFY in options.contenders and not options.send else {}
    rows = measured(options)
    print(f"{markdown(rows)}\n\n{told}", file=sys.stdout if options.markdown else sys.stderr)
    if not options.markdown:
        print(json.dumps({**told, "tables": by_table(rows)}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--servers", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--hang", type=int, default=0, metavar="N", help="see above")
    parser.add_argument("--send", type=int, default=0, metavar="N", help="see above")
    parser.add_argument("--receive", type=int, default=0, metavar="N", help="see above")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind, interleaved; medians are shown")
    parser.add_argument("--against", metavar="COMMIT", help="see above")
    parser.add_argument("--profile", type=Path, metavar="DIRECTORY", help="see above")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--role", choices=["worker"], help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(options: argparse.Namespace) -> list[Row | Ratio]:
    """Measure every contender in turn, and return its row; under them, how ours stands to Fedify, and to the commit."""
    folded: dict[str, Counter[str]] = {}
    with trees(options.against) as several:
        rows = list(rows_of(options, several, folded))
        for turn in range(1 if options.send else options.repeat):
            for row in in_turn(rows, turn):
                row.runs.append(asyncio.run(row.measure()))
    for name, stacks in folded.items():
        sampling.write_folded(stacks, options.profile / f"{name}.folded")
        sent = options.each * options.servers * options.repeat
        print(f"\n{name}\n{sampling.table(sampling.by_part(stacks), sent)}", file=sys.stderr)
    return [*rows, *compared(rows)]


def rows_of(options: argparse.Namespace, several: Sequence[Tree], folded: dict[str, Counter[str]]) -> Iterator[Row]:
    """Yield the rows of what is asked for."""
    if options.send:
        return owing(options)
    return receiving_rows(options, several) if options.receive else contending(options, several, folded)


def contending(options: argparse.Namespace, several: Sequence[Tree], folded: dict[str, Counter[str]]) -> Iterator[Row]:
    """Yield the rows of the contenders: of ours one for each tree, and with `--hang` one more for each."""
    for name in options.contenders:
        for tree in several[:1] if name == FEDIFY else several:
            for hanging in dict.fromkeys([0, options.hang]):
                yield Row(
                    table=f"{options.each} activities to {options.servers} peers",
                    labels={"contender": name, "code": tree.name, "hang": hanging},
                    measure=partial(measured_once, options, name, tree, hanging, folded),
                )


def compared(rows: Sequence[Row]) -> Iterator[Ratio]:
    """Yield how ours stands to Fedify; to the other commit; and with peers that hang, to without."""
    for row, other in itertools.permutations(rows, 2):
        same = {label for label, value in row.labels.items() if other.labels[label] == value}
        names = (str(row.labels["contender"]), str(other.labels["contender"]))
        is_beside = same >= {"code", "hang"} and not names[0].startswith("sealed") and names[1] == FEDIFY
        is_other = len(same) == len(row.labels) - 1 and "contender" in same and rows.index(row) > rows.index(other)
        if is_beside or is_other:
            told = " : ".join(" ".join(map(str, each.labels.values())) for each in (row, other))
            yield Ratio(replace(row, labels={"contender": told}), other)


async def measured_once(
    options: argparse.Namespace, name: str, tree: Tree, hanging: int, folded: dict[str, Counter[str]]
) -> dict[str, float]:
    """Let a contender send, in a process of its own with a fresh node.

    Exits if it fails, or if not all has arrived.
    """
    wire, _, queue = name.rpartition("-")
    with (
        node_environment("sqlite" if name == FEDIFY else queue) as environment,
        peer_process(options.servers, own_keys(environment), hanging=hanging) as peers,
    ):
        environment |= {
            "FEDERATION_ACTIVITYPUB": "0" if wire else "1",
            "FEDERATION_DELIVERY_CONCURRENCY": str(options.concurrency),
            "FEDERATION_GRACE": "1s",
            "BENCH_PEERS": json.dumps(peers.servers if wire else []),
        }
        # In a fixed, mixed order: the last peers hang, and deliveries to them should come up all the time.
        mixed = sorted(peers.urls, key=lambda url: peers.urls.index(url) * 7919 % len(peers.urls))
        sick = peers.urls[len(peers.urls) - hanging :]
        sizes = {"each": options.each, "warm": WARM, "limit": LIMIT_SECONDS, "concurrency": options.concurrency}
        texts = {"wire": wire, "own": OWN_URL, "words": sending.WORDS}
        task = {"servers": mixed, "hanging": sick, **sizes, **texts}
        found = asked(command(name, options), task, environment, tree)
        wanted = (options.each + WARM) * (options.servers - hanging)
        if not hanging and (taken := peers.tell("taken")) < wanted:
            sys.exit(f"{name}: only {taken} of {wanted} have arrived")
    if "folded" in found:
        folded.setdefault(f"{name}-{hanging}-{tree.name.replace(' ', '-')}", Counter()).update(found.pop("folded"))
    print(name, tree.name, hanging, found, file=sys.stderr)
    return found


def owing(options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows that measure what it takes to owe to many, on each of our queues."""
    for name in options.contenders:
        if name != FEDIFY and not name.startswith("sealed"):
            yield Row(
                table=f"owed to {options.send}",
                labels={"contender": name, "code": HERE.name, "hang": 0},
                measure=partial(owed_once, options, name),
            )


async def owed_once(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Let a process of ours owe to many, in turns with a fan-out."""
    with node_environment(name) as environment:
        environment |= {"FEDERATION_ACTIVITYPUB": "1", "BENCH_PEERS": "[]"}
        task = {"inboxes": options.send, "repeat": options.repeat}
        return asked(command(name, options), task, environment, HERE)


def receiving_rows(options: argparse.Namespace, several: Sequence[Tree]) -> Iterator[Row]:
    """Yield the rows of those that take activities."""
    for name in options.contenders:
        for tree in several[:1] if name == FEDIFY else several:
            for hanging in dict.fromkeys([0, options.hang]):
                if not name.startswith("sealed"):
                    yield Row(
                        table=f"{options.receive} activities of each of {receiving.ACTORS} actors",
                        labels={"contender": name, "code": tree.name, "hang": hanging},
                        measure=partial(received_once, options, name, tree, hanging),
                    )


async def received_once(options: argparse.Namespace, name: str, tree: Tree, hanging: int) -> dict[str, float]:
    """Let a contender take activities, in a process of its own with a fresh node."""
    port = free_port()
    with node_environment("sqlite" if name == FEDIFY else name) as environment:
        if name != FEDIFY:
            environment |= tree.variables() | receiving.settings(port)
            receiving.prepare(environment)
        program = [str(NODE), str(BENCH / "fedify_inbox.mjs"), str(port)] if name == FEDIFY else receiving.NODE
        found = await receiving.receive_all(
            program,
            environment,
            port=port,
            each=options.receive,
            connections=options.concurrency,
            hanging=hanging,
        )
    print(name, tree.name, hanging, found, file=sys.stderr)
    return found


def command(name: str, options: argparse.Namespace) -> list[str]:
    if name == FEDIFY:
        return [str(NODE), str(BENCH / "fedify.mjs")]
    worker = [sys.executable, __file__, "--role", "worker"]
    return [*worker, "--profile", str(options.profile)] if options.profile else worker


def asked(command: Sequence[str], task: dict[str, Any], environment: dict[str, str], tree: Tree) -> dict[str, Any]:
    """Return what a process answers to its task. Exits if it fails."""
    done = subprocess.run(
        command,
        input=json.dumps(task).encode(),
        env={**environment, **tree.variables()},
        capture_output=True,
        check=False,
        timeout=LONGEST_RUN_SECONDS,
    )
    sys.stderr.write(done.stderr.decode())
    if done.returncode:
        tree.give_up(done.stderr.decode())
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def install_fedify() -> dict[str, object]:
    """Install Fedify, with the Node that it needs, and return their versions."""
    install_npm_packages(INTEROP)
    package = json.loads((INTEROP / "node_modules" / "@fedify" / "fedify" / "package.json").read_text())
    node = subprocess.run([str(NODE), "--version"], capture_output=True, check=True, text=True)
    return {"fedify": package["version"], "node": node.stdout.strip()}


def signature_ms() -> float:
    """Return the processor time of one signature by RSA of 2048 bits, as ours are made."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    key.sign(b"", padding.PKCS1v15(), SHA256())
    started = time.process_time()
    for _ in range(SIGNATURES):
        key.sign(b"(request-target): post /inbox", padding.PKCS1v15(), SHA256())
    return (time.process_time() - started) * 1000 / SIGNATURES


if __name__ == "__main__":
    main()
