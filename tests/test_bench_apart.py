"""The benchmark of producers and workers apart measures what its options name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests import warm
from tests.interop.peer import install_npm_packages
from tests.patience import PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_apart.py"
COLUMNS: Final = {"queue", "enqueued_per_s", "in_bulk_per_s", "processed_per_s", "worker_CPU_us", "idle_p50_ms"}


@pytest.mark.full
def test_our_storages_are_measured_in_processes_of_their_own() -> None:
    """Each has a row; of Redis the server's processor time is told, too."""
    rows = measured("redis", "sqlite")
    assert [row["queue"] for row in rows] == ["redis", "sqlite"]
    assert [set(row) for row in rows] == [COLUMNS | {"server_CPU_us"}, COLUMNS]
    assert all(row[column] > 0 for row in rows for column in COLUMNS - {"queue"})


@pytest.mark.full
def test_nodes_queues_are_measured_as_ours_are() -> None:
    """The same columns, from processes of Node's."""
    install_npm_packages()
    rows = measured("bullmq", "node-bullmq", "bull", "node-bull")
    assert [set(row) for row in rows] == [COLUMNS | {"server_CPU_us"}] * 4


def measured(*systems: str) -> list[dict[str, float]]:
    """The rows of one short run."""
    few = ["--jobs", "20", "--repeat", "1", "--concurrency", "5"]
    command = [warm.PYTHON, str(SCRIPT), "--systems", *systems, *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    (rows,) = json.loads(done.stdout)["tables"].values()
    return list(rows)
