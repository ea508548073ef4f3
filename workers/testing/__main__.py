"""`python -m workers.testing URL`: can the storage behind this URL be trusted with jobs?"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from workers.errors import WorkersError
from workers.terminal import show_escapes
from workers.testing.case import Case
from workers.testing.cases import all_cases
from workers.testing.certification import Certificate, as_json, certify, table
from workers.testing.url_harness import UrlHarness


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the certificate.

    Returns 0 if nothing is broken, 1 if something is, 2 if the storage cannot be used at all, or not restarted. 0 is
    not yet a certificate: the last line, and `certified` in the JSON, say whether enough was shown for one.
    """
    show_escapes()
    options = make_parser().parse_args(arguments)
    try:
        certificate = asyncio.run(_certified(options.url, options.restart_command, _chosen(options.case)))
    except (WorkersError, ValueError, RuntimeError) as error:
        print(f"cannot be certified: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    print(as_json(certificate) if options.json else table(certificate))  # noqa: T201 - a command's answer
    return 1 if certificate.broken else 0


def make_parser() -> argparse.ArgumentParser:
    """Return what reads the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.testing",
        description="Run the conformance suite on a storage, in real time, and print which guarantees it keeps.",
        epilog="Use a database or server that may be thrown away: the cases leave their queues (case-...) behind.",
    )
    parser.add_argument("url", help="such as memory://, sqlite:///jobs.db or bullmq+redis://127.0.0.1:6379/0")
    parser.add_argument("--case", metavar="TEXT", default="", help="only cases whose id contains this, such as settle.")
    parser.add_argument(
        "--restart-command",
        metavar="COMMAND",
        help="a shell command that restarts the server, within 30 s; without it nothing is shown about restarts",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _chosen(text: str) -> tuple[Case, ...]:
    cases = tuple(case for case in all_cases() if text in case.id)
    if not cases:
        raise ValueError(f"no case's id contains {text!r}")
    return cases


async def _certified(url: str, restart_command: str | None, cases: Sequence[Case]) -> Certificate:
    def opened() -> UrlHarness:
        return UrlHarness(url, restart_command=restart_command)

    await opened().prepare()
    return await certify(opened, cases)


if __name__ == "__main__":
    sys.exit(main())
