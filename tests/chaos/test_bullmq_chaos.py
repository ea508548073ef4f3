"""A short round of chaos on a queue shared with Node's BullMQ; `python -m tests.chaos.bullmq` runs long ones."""

from __future__ import annotations

import pytest

from tests.chaos.bull.verdict import runs_of
from tests.chaos.bullmq.round import Terms, early_parents, run_round
from tests.interop.peer import BULLMQ, install_npm_packages


@pytest.mark.timeout(900)
@pytest.mark.spread("version")
@pytest.mark.parametrize("version", BULLMQ)
async def test_jobs_flows_and_schedules_outlive_workers_of_both_kinds(version: str, full: bool) -> None:
    """Workers in Node and here are killed over their jobs: all are completed, none runs twice at once."""
    install_npm_packages()
    jobs, kills = (300, 12) if full else (60, 4)
    findings = await run_round(Terms(version=version, jobs=jobs, kills=kills, seed="short", lock_seconds=2.0))
    assert findings.verdict.violations == []
    assert findings.kills == {"node": kills // 2, "python": kills // 2}
    assert findings.jobs >= jobs
    assert findings.iterations > 0


def test_a_parent_that_begins_too_early_is_found() -> None:
    """A child that failed has not ended, and the parent of others is not asked about it."""
    parent = [{"what": "began", "id": "parent", "at": 3}]
    child = [
        {"what": "began", "id": "child", "at": 1},
        {"what": "failed", "id": "child", "at": 2},
        {"what": "began", "id": "child", "at": 4},
    ]
    ended = [*child[:2], {"what": "began", "id": "child", "at": 2}, {"what": "completed", "id": "child", "at": 2.5}]
    runs = {name: list(runs_of("node", [*parent, *lines], None)) for name, lines in (("no", child), ("yes", ended))}
    assert len([*early_parents(runs["no"], {"parent": ["child"]})]) == 1
    assert [*early_parents(runs["yes"], {"parent": ["child"]})] == []
    assert [*early_parents(runs["no"], {"other": ["child"]})] == []
