"""A short round of chaos on a queue shared with Node's Bull; `python -m tests.chaos.bull` runs long ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.bull.round import run_round
from tests.chaos.bull.verdict import judge, runs_of
from tests.interop.bull_queue import DIALECTS
from tests.interop.peer import install_npm_packages


@pytest.mark.timeout(900)
@pytest.mark.spread("version")
@pytest.mark.parametrize("version", DIALECTS)
async def test_jobs_outlive_workers_of_both_kinds(version: str, full: bool) -> None:
    """Workers in Node and here are killed over their jobs: all are completed, none runs twice at once."""
    install_npm_packages()
    jobs, kills = (300, 12) if full else (60, 4)
    findings = await run_round(version, jobs=jobs, kills=kills, seed="short", lock_seconds=2.0)
    assert findings.verdict.violations == []
    assert findings.kills == {"node": kills // 2, "python": kills // 2}
    assert findings.pauses >= 2
    assert findings.verdict.runs >= jobs


Line = dict[str, Any]
DONE: dict[str, str | None] = {"where": "completed", "result": "1", "wanted": "1"}


def ran(began: float, ended: float | None, what: str = "completed", **counts: int) -> list[Line]:
    began_line = {"what": "began", "id": "a", "at": began}
    return [began_line] if ended is None else [began_line, {"what": what, "id": "a", "at": ended, **counts}]


STALE = {"made": 0, "written": 1}
LATE: Line = {"what": "late", "at": 3.0, "seconds": 2.9}

ROUNDS: dict[str, tuple[list[list[Line]], dict[str, str | None], str | None]] = {
    "well": ([ran(1, 2)], DONE, None),
    "after a failure": ([[*ran(1, 2, "failed"), *ran(3, 4)]], DONE, None),
    "lost": ([ran(1, 2)], {**DONE, "where": None}, "it is lost"),
    "failed": ([ran(1, 2)], {**DONE, "where": "failed"}, "is in failed"),
    "another's result": ([ran(1, 2)], {**DONE, "result": "2"}, "its result is '2'"),
    "at once": ([ran(1, 4), ran(2, 3)], DONE, "while running in node"),
    "never": ([[]], DONE, "no run of it ended well"),
    "failed too often": ([[*ran(1, 2, "failed"), *ran(3, 4, "failed"), *ran(5, 6)]], DONE, "failed 2 times of 1"),
    "forgotten": ([[*ran(1, 2, "failed"), *ran(3, 4, "failed", **STALE), *ran(5, 6)]], DONE, None),
    "failed too often after it": (
        [[*ran(1, 2, "failed"), *ran(3, 4, "failed", **STALE), *ran(5, 6, "failed", made=1, written=1), *ran(7, 8)]],
        DONE,
        "failed 3 times of 1",
    ),
    "lapsed": ([[*ran(1, 4), LATE], ran(2, 5)], DONE, None),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_what_is_wrong_is_found(name: str) -> None:
    """Of a round that went wrong the verdict says how, and of others that nothing is."""
    ledgers, found, wrong = ROUNDS[name]
    runs = [run for lines in ledgers for run in runs_of("node", lines, None)]
    verdict = judge(runs, {"a": 1}, {"a": found})
    assert bool(verdict.violations) == (wrong is not None)
    assert all(wrong and wrong in violation for violation in verdict.violations)
    assert len(verdict.lapsed) == (name == "lapsed")


def test_a_run_ends_with_its_process() -> None:
    """A job may begin anew once the process that ran it is dead, not before; the dead run asked for another."""
    cut = list(runs_of("python", ran(1, None), killed=5))
    assert judge([*cut, *runs_of("node", ran(6, 7), None)], {"a": 0}, {"a": DONE}).violations == []
    early = judge([*cut, *runs_of("node", ran(4, 7), None)], {"a": 0}, {"a": DONE})
    assert (len(early.violations), early.cut_short, early.unasked) == (1, 1, [])


def test_runs_that_nobody_asked_for_are_counted() -> None:
    """One that comes after a completed run, whose process lived on, is told."""
    verdict = judge(runs_of("node", [*ran(1, 2), *ran(3, 4)], None), {"a": 0}, {"a": DONE})
    assert (verdict.violations, len(verdict.unasked)) == ([], 1)
