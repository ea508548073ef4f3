"""Kills producers and consumers of queues at random, breaks what is under them, and tells what came of it.

    scripts/chaos [--storage redis bull sqlite postgres file] [--kills 250] [--seed N]

Kills so many processes on each storage, in rounds of up to 125, each on a fresh server or disk, where every fault of
the storage happens about every 40 kills. Progress and a table go to stderr, one JSON object to stdout. Exits with 1 if
anything that was promised did not hold. What is checked is said in `tests/chaos/verdict.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.chaos.findings import Findings
from tests.chaos.places import PLACES
from tests.chaos.round import run_round

KILLS_PER_ROUND = 125
SHOWN = 20
"""Violations of a round that are printed; all are in the JSON."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storage", nargs="+", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--kills", type=int, default=250, help="on each storage (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    # As Ctrl-C does: unwinds, so that everything started here is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"seed {options.seed}")
    started = time.monotonic()
    rounds = [
        asyncio.run(told(storage, kills, f"{options.seed}-{number}"))
        for storage in options.storage
        for number, kills in enumerate(shares(options.kills))
    ]
    violations = [violation for one in rounds for violation in one.violations]
    show(options.storage, rounds)
    minutes = (time.monotonic() - started) / 60
    say(f"{len(violations)} violations in {minutes:.1f} minutes, seed {options.seed}")
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    report = {"seed": options.seed, "minutes": round(minutes, 1), **machine, "rounds": [vars(one) for one in rounds]}
    print(json.dumps(report))
    return 1 if violations else 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shares(kills: int) -> Iterator[int]:
    for start in range(0, kills, KILLS_PER_ROUND):
        yield min(KILLS_PER_ROUND, kills - start)


async def told(storage: str, kills: int, seed: str) -> Findings:
    """The round's findings, which were also printed."""
    findings = await run_round(storage, kills=kills, seed=seed)
    did = ", ".join(f"{number} {what}" for what, number in sorted(findings.did.items()))
    ended = ", ".join(f"{number} {how}" for how, number in sorted(findings.endings.items()))
    say(f"{storage} {seed}: {did}; ended {ended}; {len(findings.violations)} violations")
    for violation in findings.violations[:SHOWN]:
        say(f"VIOLATION {violation}")
    for note in findings.notes:
        say(f"############ {storage}: {note}")
    return findings


def show(storages: list[str], rounds: list[Findings]) -> None:
    """One row for everything that was done, one column for each storage."""
    done: dict[str, Counter[str]] = {storage: Counter() for storage in storages}
    for one in rounds:
        done[one.storage].update(one.did)
        done[one.storage].update({f"ended: {how}": number for how, number in one.endings.items()})
        done[one.storage]["violations"] += len(one.violations)
    say("".join([f"{'':36}", *(f"{storage:>12}" for storage in storages)]))
    for what in dict.fromkeys(what for counter in done.values() for what in sorted(counter)):
        say("".join([f"{what:36}", *(f"{done[storage][what]:>12}" for storage in storages)]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; what was started is stopped")
