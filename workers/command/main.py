"""`python -m workers`: what may be typed, and how a command ends.

Exit statuses: 0 when all went well; 1 when there was nothing to do it to, or when workers ended by themselves; 2 for
wrong usage, and for a storage that cannot be reached. Results go to stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from workers.command import crons, jobs, limits, running, top
from workers.command.problems import CommandError
from workers.errors import WorkersError
from workers.terminal import as_typed, show_escapes
from workers.version import version

WRONG: Final = 2
INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the status to end with."""
    show_escapes()
    parser = make_parser()
    options = parser.parse_args(_typed(parser, sys.argv[1:] if arguments is None else arguments))
    try:
        return _status(options.run(options))
    except CommandError as error:
        print(f"workers: {error}", file=sys.stderr)
    except WorkersError as error:
        print(f"workers: {type(error).__name__}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return WRONG


def _typed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    try:
        return [as_typed(each) for each in arguments]
    except ValueError as error:
        parser.error(f"an argument is no UTF-8: {error}")


def _status(found: object) -> int:
    assert isinstance(found, int)
    return found


class _Version(argparse.Action):
    """Asks for the version only where it is wanted: in a checkout that takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"workers {version() or '(not installed)'}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return what reads the arguments of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m workers",
        description="Run the workers of your queues, and look after their jobs.",
        epilog="A queue is module:attribute in your code, such as shop.jobs:queue. Commands other than `run` also take "
        "a storage's URL, such as sqlite:///jobs.db?queue=mail or redis://127.0.0.1:6379/0?queue=mail.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="say which version this is, and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    running.add_to(commands)
    jobs.add_to(commands)
    crons.add_to(commands)
    limits.add_to(commands)
    top.add_to(commands)
    return parser
