#!/usr/bin/env python3
"""Makes a realistic history, in the form `federation analytics export` writes, for scripts/registry_analytics.py.

    scripts/generate_attempts.py --attempts 1000000 --servers 2000 --out DIR

The same arguments make the same rows. Needs Java 17 or newer and the extra `analytics`, in the environment of this
interpreter or in .venv beside the scripts.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, date, datetime
from pathlib import Path

from spark_environment import find_environment


def main() -> None:
    """Make what the arguments ask for. If that is impossible, end with 2 and one line."""
    find_environment()
    from federation.cli.problems import complete

    options = parse()
    complete(lambda: generate(options))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=1_000_000, help="how many (default: %(default)s)")
    parser.add_argument("--servers", type=int, default=2_000, help="how many (default: %(default)s)")
    parser.add_argument("--days", type=int, default=30, help="how many (default: %(default)s)")
    parser.add_argument(
        "--until",
        type=date.fromisoformat,
        default=datetime.now(UTC).date(),
        metavar="YYYY-MM-DD",
        help="the day after the last (default: today, UTC)",
    )
    parser.add_argument("--seed", type=int, default=0, help="another one makes other rows (default: %(default)s)")
    parser.add_argument("--hot-share", type=float, default=0.0, metavar="0..1", help="of one server in all attempts")
    parser.add_argument(
        "--out", type=directory, required=True, metavar="DIR", help="where the exports go; made if need be"
    )
    parser.add_argument("--master", help="Spark's master (default: this machine, all cores)")
    return parser.parse_args()


def directory(text: str) -> Path:
    from federation.base.settings.directories import parse_directory

    try:
        return parse_directory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def generate(options: argparse.Namespace) -> None:
    from federation.analytics.cli import tell
    from federation.analytics.session import open_session
    from scripts.made_up.generate import generate as make
    from scripts.made_up.servers import History

    names = ("attempts", "servers", "days", "until", "seed", "hot_share")
    try:
        history = History(**{name: getattr(options, name) for name in names})
    except ValueError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    begun = time.monotonic()
    spark = open_session(options.master, name="generate-attempts")
    try:
        make(spark, history, options.out, told=tell)
    finally:
        spark.stop()
    print(f"{history.attempts:,} attempts in {options.out} after {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
