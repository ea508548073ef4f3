"""The benchmark of activities measures what its options name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests import warm
from tests.patience import LONG_PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_activitypub.py"


@pytest.mark.full
def test_activities_are_sent_and_measured() -> None:
    """Also with one of two peers hanging; that is compared with the run in which none is."""
    told = measured("--each", "3", "--servers", "2", "--hang", "1")
    well, sick, ratio = told["3 activities to 2 peers"]
    assert (well["hang"], sick["hang"]) == (0, 1)
    assert well["deliveries_per_s"] > 0
    assert well["cpu_each_ms"] > 0
    assert ratio["code"] == "ratio"


@pytest.mark.full
def test_owing_is_compared_with_a_fan_out() -> None:
    """Statements are those of many rows: as many for three inboxes as for thousand."""
    (row,) = measured("--send", "3")["owed to 3"]
    assert 0 < row["send_statements"] < 100
    assert row["send_s"] > 0
    assert row["fanout_s"] > 0


@pytest.mark.full
def test_taking_is_measured() -> None:
    """Also while others name keys of a server that hangs."""
    well, sick, ratio = measured("--receive", "2", "--hang", "1")["2 activities of each of 50 actors"]
    assert (well["hang"], sick["hang"], ratio["code"]) == (0, 1, "ratio")
    assert well["requests_per_s"] > 0
    assert well["p95_ms"] >= well["median_ms"] > 0


def measured(*options: str) -> dict[str, Any]:
    """The tables of a small run on SQLite."""
    command = [warm.PYTHON, str(SCRIPT), "--contenders", "sqlite", "--repeat", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    tables: dict[str, Any] = json.loads(done.stdout)["tables"]
    return tables
