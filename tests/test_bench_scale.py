"""The benchmark of growth measures each of its figures: over few rows, and for a moment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests import warm
from tests.patience import PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_scale.py"


def measured(*options: str) -> Any:
    done = subprocess.run(
        [warm.PYTHON, str(SCRIPT), *options], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("place", [pytest.param("postgres", marks=pytest.mark.full), "sqlite"])
def test_tables_and_statements_are_measured(place: str) -> None:
    """Each table has the rows that were asked for; what is released, purged and delivered is there to be so."""
    [result] = measured("--figure", "growth", "--place", place, "--size", "100:2000:3100")["growth"]
    rows = {table["table"]: table["rows"] for table in result["tables"]}
    assert rows == {
        "server_registry": 100,
        "server_links": 100,
        "delivery_payloads": 24,
        "delivery_jobs": 2400,
        "delivery_attempts": 3100,
    }
    assert all(sum(table["parts"].values()) > table["bytes_each"] / 2 > 0 for table in result["tables"])
    costs = {cost["name"]: cost for cost in result["costs"]}
    assert {"stats", "held sweep", "outbox sweep", "release", "fan-out", "begin", "end", "purge"} <= costs.keys()
    assert all(cost["ms"] > 0 for cost in costs.values())
    assert (costs["end"]["rows"], "vacuum delivery_jobs" in costs) == (1000, place == "postgres")


@pytest.mark.full
def test_layouts_of_the_log_are_compared() -> None:
    """Each of them loses a day of attempts, or the script fails."""
    log = measured("--figure", "log", "--attempts", "31000")["log"]
    assert [each["layout"] for each in log] == ["as it is", "brin", "partitions"]
    assert all(each["write"]["wal_bytes_each"] > 100 for each in log)
    assert log[2]["purge"]["wal_bytes_each"] < log[0]["purge"]["wal_bytes_each"]


@pytest.mark.full
def test_memory_is_measured() -> None:
    """Of jobs in each queue, and of a process that has heard of many servers."""
    memory = measured("--figure", "memory", "--jobs", "200", "--servers", "300")["memory"]
    assert [(each["queue"], each["jobs"]) for each in memory["waiting"]] == [
        (queue, jobs) for queue in ("redis", "bullmq", "postgres") for jobs in (20, 200)
    ]
    assert [each["room"] for each in memory["process"]] == [30, 300]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["valkey", "cluster", "postgres"])
def test_four_shards_are_tried(kind: str) -> None:
    """Each has jobs. Each server's come in order, and three shards go on without the fourth, or the script fails."""
    [result] = measured("--figure", "shards", "--shards", kind, "--jobs", "400")["shards"]
    assert sum(shard["jobs"] for shard in result["shards"]) * 2 == result["jobs"] == 400
    assert all(shard["jobs"] > 0 for shard in result["shards"])
