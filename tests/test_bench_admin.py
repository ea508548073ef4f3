"""The benchmark of bulk commands does what it measures: everything is dropped, and it looks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests import warm
from tests.patience import PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_admin.py"


@pytest.mark.full
def test_each_command_is_measured_at_each_place() -> None:
    """Over as many deliveries as it is asked for."""
    few = ["--rows", "300", "--jobs", "50"]
    done = subprocess.run([warm.PYTHON, str(SCRIPT), *few], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    commands = json.loads(done.stdout)["commands"]
    assert [(row["place"], row["command"], row["rows"]) for row in commands] == [
        (place, command, rows)
        for place in ("sqlite", "postgres", "bullmq")
        for command, rows in (("stats", 300), ("retry", 100), ("drop", 300))
    ]
