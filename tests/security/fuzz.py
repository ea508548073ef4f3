"""`scripts/fuzz`: strangers' bytes by the million for whatever of ours reads them, guided by the code they reach.

Each reader has a process of its own: the fuzzing library ends the one it runs in.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

INSTRUMENTED: Final = [
    *(
        "federation.protocol",
        "federation.servers.blacklist_rules",
        "federation.http.messages",
        "federation.activitypub",
    ),
    *("workers.cron", "workers.dashboard", "workers.metadata", "workers.serde", "workers.storage", "json"),
]
COSTS: Final = 20
"""So many inputs of others for one of a costly reader."""


def main() -> int:
    """The number of readers that something broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for all readers together (default: 1000000)")
    parser.add_argument("--seed", type=int, default=1, help="another one tries other inputs (default: 1)")
    parser.add_argument("--only", metavar="READER", help="one reader, all inputs for it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        _fuzz(arguments.only, arguments.inputs, arguments.seed)
    from tests.security.readers import READERS

    if arguments.only is not None and arguments.only not in READERS:
        parser.error(f"no such reader; there are: {', '.join(READERS)}")
    names = [arguments.only] if arguments.only else list(READERS)
    shares = {name: 1 if READERS[name].costly else COSTS for name in names}
    each = arguments.inputs // sum(shares.values()) + 1
    broken = [name for name in names if not _survives(name, each * shares[name], arguments.seed)]
    print(
        f"{len(names)} readers, {arguments.inputs} inputs, seed {arguments.seed}; broken: {', '.join(broken) or 'none'}"
    )
    return len(broken)


def _survives(name: str, inputs: int, seed: int) -> bool:
    """Whether the reader took or refused all inputs; if not, the one that broke it is shown."""
    command = [sys.executable, "-m", "tests.security.fuzz", "--inside", "--only", name]
    done = subprocess.run(
        [*command, f"--inputs={inputs}", f"--seed={seed}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    told = [line for line in done.stderr.splitlines() if line.startswith(("Done ", "stat::number_of_executed_units"))]
    print(f"{name}: {told[-1] if told else f'status {done.returncode}'}", flush=True)
    if done.returncode:
        print(done.stderr[-5_000:])
    return not done.returncode


def _fuzz(name: str, inputs: int, seed: int) -> None:
    """Never returns."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.security.readers import READERS
    reader = READERS[name]

    def read(data: bytes) -> None:
        with suppress(*reader.refusals):
            reader.read(data)

    with tempfile.TemporaryDirectory() as corpus:
        for number, known in enumerate(reader.seeds):
            (Path(corpus) / str(number)).write_bytes(known)
        limits = ["-max_len=8192", "-timeout=10", "-rss_limit_mb=2048"]
        where = [f"-artifact_prefix={corpus}/", corpus]
        atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed}", *limits, *where], read)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
