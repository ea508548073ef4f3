#!/usr/bin/env python3
"""`federation analytics run`, for spark-submit or by itself: scorecards, trends and a report of the servers we know.

    scripts/registry_analytics.py --input DIR --out OUT --json
    spark-submit --master spark://host:7077 scripts/registry_analytics.py --input DIR --out OUT

Needs Java 17 or newer and the extra `analytics`, in the environment of this interpreter or in .venv beside the scripts.
"""

from __future__ import annotations

import sys

from spark_environment import find_environment


def main() -> None:
    """Run the command, and end as it does."""
    find_environment()
    from federation.cli import main as federation

    federation(["analytics", "run", *sys.argv[1:]])


if __name__ == "__main__":
    main()
