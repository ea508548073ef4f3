"""The benchmark of outages measures each of its figures."""

from __future__ import annotations

import importlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from db import Database
from tests import warm
from tests.patience import LONG_PATIENCE_SECONDS
from workers.storage.sql import SqlStorage
from workers.testing.steps import job

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_outage.py"


def measured(*options: str) -> list[dict[str, object]]:
    """What a tiny run on SQLite tells."""
    command = [warm.PYTHON, str(SCRIPT), "--queue", "sqlite", "--repeat", "1", "--concurrency", "10", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    figures: list[dict[str, object]] = json.loads(done.stdout)["figures"]
    return figures


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_figure_is_measured_and_says_whether_its_bar_is_met() -> None:
    """Of ten servers, one of which hangs, and a few deliveries each."""
    figures = measured("--scale", "0.003", "--figure", "hanging", "--kind", "known")
    names = [str(figure["figure"]) for figure in figures]
    assert [name.split(",")[0].split(" of ")[0] for name in names] == [
        "speed to the same healthy servers",
        "p95",
    ]
    for figure in figures:
        least = figure["has_to_be"] == "at least"
        value, bar = float(str(figure["value"])), float(str(figure["bar"]))
        assert figure["met"] is (value >= bar if least else value <= bar)
    assert figures[0]["healthy_failed"] == 0


async def test_statements_that_go_past_sqlalchemy_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, postgres_url: str
) -> None:
    """Those of a queue in a file, and those that PostgreSQL is sent alone."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    counting = importlib.import_module("bench.outage.counting")
    storage, database = SqlStorage(f"sqlite:///{tmp_path}/queue.db"), Database(postgres_url)
    await storage.migrate()
    with counting.counted_statements() as counted:
        await storage.connect()
        await storage.enqueue([job("a")])
        await database.alone("SELECT 1 AS one", {})  # the first one opens the connection
        before = replace(counted)
        await storage.enqueue([job("b")])
        assert await database.alone("SELECT 1 AS one", {})
    await storage.disconnect()
    await database.close()
    asked = counted - before
    assert asked.executions == 1
    assert asked.of_queues > 0
