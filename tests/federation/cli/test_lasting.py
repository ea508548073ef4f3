"""What a command says while it lasts."""

from __future__ import annotations

import io
import os
import pty
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from federation.cli.output import lasting
from tests import warm
from tests.federation.cli.conftest import Command
from tests.patience import PATIENCE_SECONDS


def test_who_watches_a_terminal_is_told_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for how long, until it is over."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with lasting("waiting", after=0):
            first = os.read(ours, 100)
    assert first == b"\rwaiting ... 0 s"
    os.close(ours)


def test_what_is_over_at_once_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often, and nobody waits for it."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        for _ in range(3):
            with lasting("waiting", after=PATIENCE_SECONDS):
                pass
        terminal.write("over")
    assert os.read(ours, 100) == b"over"
    os.close(ours)


def test_a_program_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal."""
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    with lasting("waiting", after=0):
        pass
    assert told.getvalue() == ""


def test_an_upgrade_that_waits_says_so(command_anywhere: Command, empty_environment: Path) -> None:
    """Here for somebody who has the database locked."""
    command_anywhere("init", "--url", "https://node.example")
    ours, theirs = pty.openpty()
    with closing(sqlite3.connect("federation.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        child = subprocess.Popen([warm.PYTHON, "-m", "federation", "upgrade"], stdout=subprocess.DEVNULL, stderr=theirs)
        os.close(theirs)
        told = os.read(ours, 100)
    assert told.startswith(b"\rupgrading the tables ... ")
    assert child.wait(PATIENCE_SECONDS) == 0
    os.close(ours)
