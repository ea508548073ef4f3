"""The benchmark of strangers measures each of its figures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests import warm
from tests.patience import LONG_PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_strangers.py"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_figure_is_measured_and_says_whether_its_bar_is_met() -> None:
    """A trickle of bad requests for three seconds, one of each kind for its cost, two large ones at once."""
    options = ["--rate", "9", "--seconds", "3", "--offered", "5", "--requests", "1", "--at-once", "2"]
    done = subprocess.run(
        [warm.PYTHON, str(SCRIPT), *options], capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    names = [figure["figure"].split(",")[0] for figure in figures]
    assert names[:4] == ["p95 of good follows", "good follows lost", "growth of resident memory", "deliveries"]
    assert set(names[4:-2]) == {"CPU of a refused request"}
    assert names[-2:] == ["growth of resident memory"] * 2
    for figure in figures:
        least = figure["has_to_be"] == "at least"
        assert figure["met"] is (figure["value"] >= figure["bar"] if least else figure["value"] <= figure["bar"])
    answers = json.loads(next(line for line in done.stderr.splitlines() if line.startswith("{")))
    assert not any("200" in statuses for statuses in answers.values())
