"""Where the scripts beside this one find Spark, and this checkout, which is on the path once this is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def find_environment() -> None:
    """Continue this program where pyspark is installed: here, or in `.venv`. Otherwise end, and say what to install."""
    if importlib.util.find_spec("pyspark") and importlib.util.find_spec("sqlmodel"):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.prefix) != ROOT / ".venv":
        os.execv(python, [str(python), *sys.argv])  # noqa: S606 - the same program, by the right interpreter
    sys.exit(f"{Path(sys.argv[0]).name}: this needs more packages: pip install '{ROOT}[analytics]'")
