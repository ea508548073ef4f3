"""The benchmark of deliveries measures a fan-out, and that fits where it has to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests import warm
from tests.patience import LONG_PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_delivery.py"


@pytest.mark.timeout(900)
def test_a_post_to_many_servers_takes_at_most_1200_bytes_of_valkey_for_each(full: bool) -> None:
    """Its jobs refer to the text and hold no copy of its 2.4 KB."""
    recipients = 20_000 if full else 5_000
    fan_out = [warm.PYTHON, str(SCRIPT), "--fanout", str(recipients)]
    done = subprocess.run(fan_out, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["recipients"], row["payload_bytes"]) == (recipients, 2_400)
    assert 120 < row["redis_mb"] * 1e6 / recipients <= 1_200
    assert row["enqueue_s"] > 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_open_pages_are_measured_beside_none() -> None:
    """In turns, each in a node of its own."""
    few = ["--queue", "sqlite", "--servers", "2", "--deliveries", "40", "--pages", "0", "10"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *few], capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["pages"] for row in rows] == [0, 10]
    assert all(row["deliveries_per_s"] > 0 and not row["failed"] for row in rows)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_several_processes_are_measured_from_outside() -> None:
    """With their share of the machine, and their memory."""
    measure = [
        sys.executable,
        str(SCRIPT),
        "--queue",
        "sqlite",
        "--servers",
        "2",
        "--deliveries",
        "40",
        "--processes",
        "2",
    ]
    done = subprocess.run(measure, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["processes"] == 2
    assert 0 < row["worker_cores"] <= 2
    assert row["deliveries_per_s"] > 0
    assert row["supervisor_mib"] < row["memory_mib"] < 200
