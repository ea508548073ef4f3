"""Ctrl-C, at every moment of a command: one line and status 130, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.federation.cli.conftest import Command
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]

# Raises the signal as the named module begins to be imported, or as the command asks for what it was to do.
AT_IMPORT = """
import os, signal, sys
MOMENT = sys.argv[1]
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == MOMENT:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["federation", *sys.argv[2:]]
from federation.entry import main
main()
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AT_IMPORT, *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


MOMENTS = ["federation.cli", "typer", "federation.cli.problems", "pydantic", "sqlalchemy.orm"]


@pytest.mark.parametrize("module", [*MOMENTS, "aiosqlite", "db.migrate"])
def test_an_interrupt_ends_in_one_line(tmp_path: Path, module: str) -> None:
    """From the first import to the work itself; `init` is one that does all of it."""
    done = run(module, "init", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "federation: interrupted\n")


@pytest.mark.parametrize("module", ["typer", "db.migrate"])
def test_a_program_gets_it_as_json(tmp_path: Path, module: str) -> None:
    """As any other error."""
    done = run(module, "init", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr, "interrupted" in done.stdout) == (130, "", True)


def test_an_interrupt_that_became_another_error_is_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it comes while a class is made: Python 3.11 raises a RuntimeError from it."""

    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setattr("federation.base.settings.Settings.load", interrupted)
    done = command("servers", "list")
    assert (done.status, done.stderr) == (130, "federation: interrupted\n")


def test_an_interrupt_while_asked_is_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is done."""

    def ask(*_: object, **__: object) -> bool:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise typer.Abort from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", ask)
    done = command("queues", "clean")
    assert (done.status, done.stderr) == (130, "federation: interrupted\n")
