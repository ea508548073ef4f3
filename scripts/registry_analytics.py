#!/usr/bin/env python3
"""`federation analytics run`, for spark-submit or by itself: scorecards, trends and a report of the servers we know.

    scripts/registry_analytics.py --input DIR --out OUT --json
    spark-submit --master spark://host:7077 scripts/registry_analytics.py --input DIR --out OUT

Needs Java 17 or newer and the extra `analytics`, in the environment of this interpreter or in .venv beside the scripts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Run it; ends as the command does."""
    find_environment()
    from federation.cli import main as federation

    federation(["analytics", "run", *sys.argv[1:]])


def find_environment() -> None:
    """This program goes on where pyspark is installed: here, or in `.venv`."""
    if importlib.util.find_spec("pyspark") and importlib.util.find_spec("sqlmodel"):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.prefix) != ROOT / ".venv":
        os.execv(python, [str(python), *sys.argv])  # noqa: S606 - the same program, by the right interpreter
    sys.exit(f"{Path(__file__).name}: this needs more packages: pip install '{ROOT}[analytics]'")


if __name__ == "__main__":
    main()
