"""scripts/demo, told to its end: what it promises whoever watches comes true, or it would end with 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 300


@pytest.mark.full
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("story", [[], ["--activitypub"]], ids=["nodes", "activitypub"])
def test_everything_arrives_once(story: list[str]) -> None:
    """At two peers, and at a server of Fedify's where there is npm; in numbers that a program can read."""
    finished = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demonstration"), *story, "--once", "--json"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    assert told["delivered"] == (200 * told["peers"] if story else 402)
    assert (told["failed"], told["lost"], told["duplicates"]) == (0, 0, 0)
