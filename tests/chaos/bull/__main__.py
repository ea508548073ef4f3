"""Kills Node's Bull workers and ours at random on one queue, and tells what came of it.

    python -m tests.chaos.bull [--version 1.0.0 1.1.3] [--jobs 400] [--kills 15] [--seed N]

Two workers of each kind share the queue; half of the jobs are added in Node, and each fails up to twice as its data
says. One line per version goes to stderr, one JSON object to stdout. Exits with 1 if a job was lost, or run twice at
once. What is checked is said in `tests/chaos/bull/verdict.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import signal
import sys
from dataclasses import asdict

from tests.chaos.bull.round import Findings, run_round
from tests.chaos.bull.verdict import say
from tests.interop.bull_queue import DIALECTS
from tests.interop.peer import install_npm_packages


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.bull", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", nargs="+", default=list(DIALECTS), choices=list(DIALECTS))
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    if shutil.which("npm") is None:
        sys.exit("there is no npm on this machine: install Node.js 20 or newer")
    install_npm_packages()
    # As Ctrl-C does: unwinds, so that everything started here is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds = [
        told(asyncio.run(run_round(version, jobs=options.jobs, kills=options.kills, seed=str(options.seed))))
        for version in options.version
    ]
    print(json.dumps([asdict(one) for one in rounds]))
    return 1 if any(one.verdict.violations for one in rounds) else 0


def told(findings: Findings) -> Findings:
    """The findings, which were also printed."""
    verdict = findings.verdict
    say(
        f"bull {findings.version}, seed {findings.seed}: {findings.jobs} jobs, {findings.planned_failures} failures "
        f"planned, {findings.kills} killed, {findings.pauses} pauses; {verdict.runs} runs, {verdict.failed_runs} "
        f"failed, {verdict.forgotten} forgotten, {verdict.cut_short} cut short; {len(verdict.violations)} violations "
        f"in {findings.seconds:g} s"
    )
    verdict.tell()
    return findings


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; what was started is stopped")
