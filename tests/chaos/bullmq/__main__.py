"""Kills Node's BullMQ workers and ours at random on one queue, and tells what came of it.

    python -m tests.chaos.bullmq [--version 5 6] [--jobs 2000] [--kills 100] [--seed N]
    python -m tests.chaos.bullmq --defaults [--crew node node node node]

Plain jobs and flows, half of them added in Node, beside a job scheduler. Jobs fail up to twice as their data says. With
`--defaults` Node's jobs have one attempt and every worker's `maxStalledCount` is 1, so that jobs may end as failed.
One line per version goes to stderr, one JSON object to stdout. Exits with 1 if a job was lost, or run twice at once.
What is checked is said in `tests/chaos/bull/verdict.py`; here, no parent runs before its children ended either.
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

from tests.chaos.bull.verdict import say
from tests.chaos.bullmq.round import ATTEMPTS, MIXED, Findings, Terms, run_round
from tests.interop.peer import BULLMQ, install_npm_packages


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.bullmq", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", nargs="+", default=list(BULLMQ), choices=list(BULLMQ))
    parser.add_argument("--jobs", type=int, default=2_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--crew", nargs="+", default=list(MIXED), choices=sorted(set(MIXED)))
    parser.add_argument("--defaults", action="store_true", help="Node's attempts and stalls; some may fail")
    options = parser.parse_args()
    if shutil.which("npm") is None:
        sys.exit("there is no npm on this machine: install Node.js 20 or newer")
    install_npm_packages()
    # As Ctrl-C does: unwinds, so that everything started here is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds = []
    for version in options.version:
        terms = Terms(
            version=version,
            jobs=options.jobs,
            kills=options.kills,
            seed=str(options.seed),
            kinds=options.crew,
            attempts=1 if options.defaults else ATTEMPTS,
            stalls=1 if options.defaults else 100,
        )
        rounds.append(told(asyncio.run(run_round(terms))))
    print(json.dumps([asdict(one) for one in rounds]))
    return 1 if any(one.verdict.violations for one in rounds) else 0


def told(findings: Findings) -> Findings:
    """The findings, which were also printed."""
    verdict, terms = findings.verdict, findings.terms
    say(
        f"bullmq {terms.version}, seed {terms.seed}, {' '.join(terms.kinds)}: {findings.jobs} jobs, "
        f"{findings.planned_failures} failures planned, {findings.iterations} runs of the schedule, {findings.kills} "
        f"killed; {findings.failed} failed for good; {verdict.runs} runs, {verdict.failed_runs} failed, "
        f"{verdict.cut_short} cut short; {len(verdict.violations)} violations in {findings.seconds:g} s"
    )
    verdict.tell()
    return findings


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; what was started is stopped")
