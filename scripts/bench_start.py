"""What a command of ours costs before it does anything, and how soon a worker is ready.

    python scripts/bench_start.py [--places sqlite postgres] [--only WORDS ...] [--repeat 5] [--against COMMIT]
        [--markdown]

Each command is a process of its own with a fresh node that has no deliveries: its CPU time, user and system, and how
many modules it imports. They are counted in a run of its own, as that takes longer (`python -X importtime`), and the
first run of all is not counted, as it writes byte code. A worker is begun until its log says that all its processes
take deliveries, and stopped then: the time to that moment, the CPU time of its processes with their end, and what each
of those that deliver holds in memory then. `--only` measures the commands that have some of these words.

`--against COMMIT` measures that commit's code, too (`bench/trees.py`); both take turns. The least of `--repeat` runs is
shown, because all that another process does to a run makes it longer: tables on stderr, one JSON object on stdout; with
`--markdown` the tables on stdout instead. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from bench.trees import ROOT, Tree, trees

sys.path.insert(0, str(ROOT))

from bench.deliveries import node_environment
from bench.node import machine, unwind_when_terminated
from bench.report import in_turn, markdown

PLACES: Final = ("sqlite", "postgres")
PEER: Final = "https://peer.example"
NODE_COMMANDS: Final = (
    "actions list",
    "blacklist list",
    f"blacklist check {PEER}",
    "db check",
    "deliveries list",
    "deliveries stats",
    "deliveries retry --all",
    "doctor",
    "keys show",
    "queues stats",
    "received",
    "scheduler list",
    "servers list",
    f"servers show {PEER}",
    "upgrade",
    "users list",
    f"why {PEER}",
    "workers list",
)
"""What operators ask a node, and programs every minute."""
ANYWHERE: Final = ("--help", "--version", "deliveries drop --help", "analytics --help")
QUEUE_COMMANDS: Final = ("stats", "list", "crons list", "limits list")
WORKERS: Final = {"workers run": 1, "workers run --processes 2": 2}
READY: Final = b'"queue": "federation-delivery"'
LONGEST_SECONDS: Final = 60
_URL: Final = re.compile(r"\S+\?queue=mail")


def main() -> None:
    """Run the benchmark."""
    options = parse()
    unwind_when_terminated()
    with trees(options.against) as several:
        rows = [row for place in options.places for row in measured_at(place, options, several)]
    told = {"repeat": options.repeat, **machine()}
    print(f"{markdown(rows)}\n\n{told}", file=sys.stdout if options.markdown else sys.stderr)
    if not options.markdown:
        print(json.dumps({**told, "rows": [{"table": row.table, **row.cells} for row in rows]}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="see above")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each command, interleaved; the least is shown")
    parser.add_argument("--against", metavar="COMMIT", help="see above")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args()


@dataclass(slots=True, kw_only=True)
class Row:
    """One command, and the least that it took in any run."""

    table: str
    command: str
    tree: Tree
    processes: int = 0
    """How many deliver; none for a command that ends by itself."""
    least: dict[str, float] = field(default_factory=dict)

    @property
    def cells(self) -> dict[str, object]:
        """What the table shows, by column."""
        return {"command": _URL.sub("URL", self.command), "code": self.tree.name, **self.least}

    def take(self, run: Mapping[str, float]) -> None:
        self.least = {name: min(value, self.least.get(name, value)) for name, value in run.items()}

    @property
    def words(self) -> list[str]:
        """What starts it."""
        return [sys.executable, "-m", *self.command.split()]


def measured_at(place: str, options: argparse.Namespace, several: Sequence[Tree]) -> list[Row]:
    """Measure every command on a fresh node there."""
    with node_environment(place) as settings, tempfile.TemporaryDirectory(prefix="fd-bench-") as directory:
        here = {**settings, "FEDERATION_GRACE": "1s", "PYTHONDONTWRITEBYTECODE": ""}
        rows = [row for row in rows_at(place, here, several) if any(words in row.command for words in options.only)]
        prepare(here, Path(directory))
        for turn in range(-1, options.repeat):
            for row in in_turn(rows, turn):
                environment = {**here, **row.tree.variables()}
                measure = started if row.processes else ended
                found = measure(row, environment, Path(directory))
                if turn >= 0:
                    row.take(found)
        for row in rows:
            if row.processes > 1:  # a supervisor, whose children import as much as one process
                continue
            row.least["modules"] = modules(row, {**here, **row.tree.variables()}, Path(directory))
    return rows


def rows_at(place: str, settings: Mapping[str, str], several: Sequence[Tree]) -> Iterator[Row]:
    """Yield what to measure: on SQLite also what needs no node."""
    queue = f"{settings['DATABASE_URL']}{'&' if '?' in settings['DATABASE_URL'] else '?'}queue=mail"
    node = [f"federation {words}" for words in (*(ANYWHERE if place == PLACES[0] else ()), *NODE_COMMANDS)]
    queues = [f"workers {words} {queue}" for words in QUEUE_COMMANDS]
    for command in (*node, *(["workers --help"] if place == PLACES[0] else []), *queues):
        for tree in several:
            yield Row(table=f"commands, {place}", command=command, tree=tree)
    for command, processes in WORKERS.items():
        for tree in several:
            yield Row(table=f"a worker, {place}", command=f"federation {command}", tree=tree, processes=processes)


def prepare(environment: Mapping[str, str], directory: Path) -> None:
    """Make the node's tables."""
    words = [sys.executable, "-m", "federation", "upgrade", "--host-tables"]
    done = subprocess.run(words, env={**environment, "PYTHONPATH": str(ROOT)}, cwd=directory, capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.decode())


@contextmanager
def begun(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:  # those of `Popen`, of any type
    """Begin a process; it is gone when the context ends, and after a minute in any case."""
    with subprocess.Popen(words, **options) as process:
        limit = threading.Timer(LONGEST_SECONDS, process.kill)
        limit.start()
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            limit.cancel()


def ended(row: Row, environment: Mapping[str, str], directory: Path) -> dict[str, float]:
    """Run a command to its end. Exits if it fails; that it finds nothing is no failure."""
    with tempfile.TemporaryFile() as output:
        with begun(row.words, env=environment, cwd=directory, stdout=output, stderr=output) as process:
            status, cpu = waited(process)
        if status not in (0, 1):
            output.seek(0)
            row.tree.give_up(output.read().decode())
    return {"cpu_s": cpu}


def started(row: Row, environment: Mapping[str, str], directory: Path) -> dict[str, float]:
    """Run a worker until all its processes deliver, and stop it."""
    at = time.perf_counter()
    with begun(row.words, env=environment, cwd=directory, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None, "it was asked for"
        told, delivering = ready(row, process.stderr)
        after = time.perf_counter() - at
        if len(delivering) < row.processes:
            row.tree.give_up(told)
        memory = max(resident_mib(pid) for pid in delivering)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        _, cpu = waited(process)
    return {"ready_s": after, "cpu_s": cpu, "MiB": memory}


def ready(row: Row, log: IO[bytes]) -> tuple[str, set[int]]:
    """Read the log until so many processes take deliveries. Return it, and their numbers."""
    lines, delivering = [], set[int]()
    for line in log:
        lines.append(line.decode())
        if READY in line and b'"worker_ready"' in line:
            delivering.add(int(json.loads(line)["worker_id"].split(":")[1]))
        if len(delivering) == row.processes:
            break
    return "".join(lines), delivering


def resident_mib(pid: int) -> float:
    """Return what the process holds in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def waited(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Return the status of a process that ends, and the CPU time that it and those it waited for have taken."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def modules(row: Row, environment: Mapping[str, str], directory: Path) -> int:
    """Return how many modules the process imports until it ends, or delivers."""
    words = [row.words[0], "-X", "importtime", *row.words[1:]]
    imported = 0
    with begun(words, env=environment, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None, "it was asked for"
        for line in process.stderr:
            imported += line.startswith(b"import time:") and not line.endswith(b"imported package\n")
            if READY in line and b'"worker_ready"' in line:
                process.send_signal(signal.SIGTERM)
    return imported


if __name__ == "__main__":
    main()
