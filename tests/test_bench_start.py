"""The benchmark of what commands cost before they do anything measures each of its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.patience import LONG_PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_start.py"


@pytest.mark.full
def test_commands_and_workers_are_measured() -> None:
    """A command, and a worker until it delivers."""
    only = ["--places", "sqlite", "--only", "users list", "workers run", "--repeat", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *only], capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    found = {row["command"]: row for row in json.loads(done.stdout)["rows"]}
    assert set(found) == {"federation users list", "federation workers run", "federation workers run --processes 2"}
    assert found["federation users list"]["modules"] > 100
    assert all(row["cpu_s"] > 0 for row in found.values())
    assert found["federation workers run"]["ready_s"] < found["federation workers run --processes 2"]["ready_s"]
