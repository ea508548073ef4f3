"""The benchmark of the queue core measures what its options name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from tests import warm
from tests.interop.peer import install_npm_packages
from tests.patience import PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_queue.py"


@pytest.mark.full
def test_nodes_bull_is_measured_beside_our_storage() -> None:
    """Each version of Bull has a row of its own after ours, which says how many times slower it is."""
    install_npm_packages()
    (rows,) = measured("--storage", "bull", "--concurrency", "5", "--peers", "node-bull", "node-bull-1.0").values()
    assert [row["queue"] for row in rows] == ["bull", "node-bull 1.1.3", "node-bull-1.0 1.0.0"]
    assert all(row["enqueued_per_s"] > 0 and row["processed_per_s"] > 0 for row in rows)
    assert all(row["times slower"] > 0 for row in rows[1:])


@pytest.mark.parametrize("storage", ["sqlite", "redis"])
def test_a_terminated_run_leaves_nothing_behind(tmp_path: Path, storage: str) -> None:
    """Neither a directory nor a server: it ends as by Ctrl-C."""
    many = ["--storage", storage, "--concurrency", "1", "--jobs", "1000000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([warm.PYTHON, str(SCRIPT), *many], env=environment, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(tmp_path.glob("*/*")):
            assert time.monotonic() < deadline, "it has written nothing"
            time.sleep(0.05)
        run.terminate()
        assert run.wait(timeout=PATIENCE_SECONDS) == -signal.SIGINT
    assert list(tmp_path.iterdir()) == []


def measured(*options: str) -> dict[str, list[dict[str, float]]]:
    """The tables of one short run on the memory storage."""
    few = ["--storage", "memory", "--concurrency", "--repeat", "1", "--jobs", "9"]
    done = subprocess.run(
        [warm.PYTHON, str(SCRIPT), *few, *options], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    tables: dict[str, list[dict[str, float]]] = json.loads(done.stdout)["tables"]
    return tables
