"""What the benchmarks make of runs that took turns."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

SCRIPTS: Final = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench.report")


def test_a_ratio_is_of_runs_side_by_side(report: ModuleType) -> None:
    """A machine that slows down for both changes nothing, and what may be 0 has no ratio."""
    ours = [{"per_s": 100.0, "failed": 0}, {"per_s": 50.0, "failed": 1}, {"per_s": 10.0, "failed": 1}]
    others = [{"per_s": 50.0, "failed": 1}, {"per_s": 25.0, "failed": 1}, {"per_s": 5.0, "failed": 1}]
    assert report.ratios(ours, others) == {"per_s": 2.0}
    assert report.ratios(ours[:1], [{"per_s": 0.0}]) == {}


def test_nobody_is_always_first(report: ModuleType) -> None:
    """Who was last in a turn begins the next one."""
    assert [report.in_turn("abc", turn) for turn in range(3)] == ["abc", "cba", "abc"]


def test_the_ratio_stands_below_its_rows(report: ModuleType) -> None:
    """In the columns of both."""

    async def nothing() -> dict[str, float]:
        return {}

    def row(code: str, speed: float) -> object:
        labels = {"queue": "redis", "code": code}
        return report.Row(table="one", labels=labels, measure=partial(nothing), runs=[{"processed_per_s": speed}])

    lines = report.markdown(report.with_ratios([row("a here", 3000.0), row("b there", 2000.0)])).splitlines()
    assert lines[2:] == [
        "| queue | code | processed/s |",
        "|---|---|---|",
        "| redis | a here | 3 000 |",
        "| redis | b there | 2 000 |",
        "| redis | ratio | 1.5 |",
    ]
