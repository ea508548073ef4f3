"""Every recipe of the manual runs as it stands, and prints what its text says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.manual import RECIPES, examples, run_example

PRINTED = {
    "Fire and forget": "sent to bob\nsent to carol\nsent to dave",
    "Request and response": "3.5\nUnrecoverableError - nobody can divide by zero\nJobTimeoutError",
    "Deduplication by id": ("queued duplicate queued\nqueued duplicate\nrendered 3\ncompleted - rendered 3"),
    "Deduplication by key": (
        "simple: queued duplicate True\ndebounce: queued\ndebounce: duplicate\ndebounce: duplicate\n"
        "task: queued\ntask: duplicate\nrender 1\nsimple: queued\nreport monday\n"
        "throttle: duplicate completed\ndraft hello!\nmail two comments"
    ),
    "Chains": "published cat.png at 800\n3 links\nfrom outside",
    "Tasks": "queued\nduplicate\nduplicate\nreindexing row 7",
    "Enqueue in your own transaction": "the card was declined\nqueued None",
    "A serde of your own": "{'of': 'cat', 'pixels': b'\\x00\\xff\\xfe\\x80'}",
    "Progress and logs": "as it comes: {'row': 3, 'of': 3}\nafterwards: {'row': 3, 'of': 3}",
    "Again later": "there after 150 looks, in attempt 1 of 3\n3 runs: the disk is full",
    "Cancel": "cancelled\nprocessing\ncleaning up: cancelled\njob 'film-1' was cancelled\ncancelled",
    "Stop gracefully": ("the quick one finished\nthe endless one was stopped: shutdown\nqueued after 0 attempts"),
    "Operate a queue": ("mail-2 failed: no such host\nretried: 1\npromoted: 1\nremoved: 1 drained: 1\ncleaned: 3\n{}"),
}


@pytest.mark.parametrize("title", examples(RECIPES))
def test_the_recipe_runs(title: str, tmp_path: Path) -> None:
    """In a process and directory of its own, without a warning."""
    finished = run_example(examples(RECIPES)[title], tmp_path)
    assert finished.stdout.splitlines() == PRINTED[title].splitlines()


def test_what_a_recipe_logs_names_its_job(tmp_path: Path) -> None:
    """The recipe on progress shows where a handler's lines go."""
    finished = run_example(examples(RECIPES)["Progress and logs"], tmp_path)
    assert finished.stderr.splitlines() == ["workers.job import-1: three rows, none of them new"]


def test_no_recipe_is_missed() -> None:
    """Every section of the page has an example, and every example an expectation."""
    titles = [line.removeprefix("## ") for line in RECIPES.read_text().splitlines() if line.startswith("## ")]
    assert titles == list(examples(RECIPES)) == list(PRINTED)
