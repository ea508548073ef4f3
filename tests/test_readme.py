"""The program that README.md shows, as a user runs it."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from federation.base.settings.settings import Settings
from tests import warm
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "examples" / "script.py"
PEER = "http://127.0.0.1:9"


def run(directory: Path, *command: str) -> str:
    """What Python printed, in a directory where no variable of ours is set; nothing on stderr, no warning either."""
    ours = {name.upper() for name in Settings.model_fields}
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [warm.PYTHON, *command],
        cwd=directory,
        env=environment | {"DEV_ALLOWED_HOSTNAMES": "127.0.0.1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


def test_the_program_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """On a node fresh from `init`, with a user and a follower: a post, a delivery, and nothing left open at its end."""
    run(tmp_path, "-m", "federation", "init", "--url", "http://127.0.0.1:8451")
    run(tmp_path, "-m", "federation", "users", "add", "alice")
    with closing(sqlite3.connect(tmp_path / "federation.sqlite3")) as database, database:
        database.execute(
            "INSERT INTO follows (id, follower_id, following_id, accepted, created_at, following_server_url)"
            " VALUES ('f', 'bob', 'alice', 1, '2026-01-01 00:00:00', ?)",
            (PEER,),
        )
    told = run(tmp_path, str(SCRIPT), "alice", "hello, fediverse")
    assert told.endswith("is published; deliveries owed: 1\n")
    with closing(sqlite3.connect(tmp_path / "federation.sqlite3")) as database:
        assert database.execute("SELECT author_id, is_local FROM posts").fetchall() == [("alice", 1)]
        assert database.execute("SELECT server_url, state FROM delivery_jobs").fetchall() == [(PEER, "ready")]


def test_the_readme_shows_that_program() -> None:
    """To the letter."""
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == SCRIPT.read_text()


def test_the_tests_of_what_one_may_rely_on_are_there() -> None:
    """Each by its path, or beside one that is named in full in its row or in the row above."""
    page = (ROOT / "docs" / "understand" / "guarantees.md").read_text()
    table = page.partition("| You may rely on |")[2].partition("\n\n")[0]
    folder = ROOT
    for name in re.findall(r"`([\w/]*test_\w+\.py)`", table):
        file = ROOT / name if "/" in name else next(iter(folder.glob(name)), None) or next((ROOT / "tests").rglob(name))
        assert file.exists(), name
        folder = file.parent
