"""Ctrl-C, at every moment of a command: one line and status 130, and no traceback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from tests.federation.cli.conftest import Command
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]

# Raises the signal as the named module, or one of that number after `federation` itself, begins to be imported.
AT_IMPORT = """
import os, signal, sys
MOMENT = sys.argv[1]
class Interrupting:
    count = -1
    def find_spec(self, name, path=None, target=None):
        self.count += self.count >= 0 or name == "federation.interrupts"
        if MOMENT in (name, str(self.count - 1)):
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


MOMENTS = [
    "federation.other_packages",
    "federation.cli",
    "typer",
    "federation.cli.problems",
    "pydantic",
    "sqlalchemy.orm",
]


@pytest.mark.parametrize("module", [*MOMENTS, "aiosqlite", "db.migrate", *map(str, range(1, 700, 90))])
def test_an_interrupt_ends_in_one_line(tmp_path: Path, module: str) -> None:
    """From the first import to the work itself; `init` is one that does all of it."""
    done = run(module, "init", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "federation: interrupted\n")


@pytest.mark.parametrize("module", ["typer", "db.migrate"])
def test_a_program_gets_it_as_json(tmp_path: Path, module: str) -> None:
    """As any other error."""
    done = run(module, "init", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr, "interrupted" in done.stdout) == (130, "", True)


# What installers make of the entry point, without what theirs may import before it.
SCRIPT = "import sys\nfrom federation.entry import main\nsys.exit(main())\n"
STARTS = {"script": ["./federation"], "-m": ["-m", "federation"]}
COMMANDS = {"servers list": "", "doctor --json": '"interrupted"'}
"""And what a program finds on stdout, where one asked for it."""
DELAYS_MS = (0, 5, 10, 20, 40, 80, 160, 320)
FIRST_LINES = re.compile(r'File "\S*/federation/(?:__init__|interrupts)\.py"')
OURS = re.compile(r'File "\S*/federation/\S+\.py"')


def interrupt(directory: Path, *arguments: str, after: float) -> tuple[int, str, str]:
    """Status, stdout and stderr of a Python that gets the signal so many seconds after its start."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(after)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, stdout, stderr


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("start", STARTS)
def test_ctrl_c_at_any_moment_ends_in_one_line(tmp_path: Path, start: str, command: str) -> None:
    """Or before our first line, where it is Python's own: it dies of it, in silence or with a traceback of itself."""
    (tmp_path / "federation").write_text(SCRIPT)
    for delay in DELAYS_MS:
        status, stdout, stderr = interrupt(tmp_path, *STARTS[start], *command.split(), after=delay / 1000)
        if status != 130 and "KeyboardInterrupt" in stderr:
            assert len(OURS.findall(stderr)) == len(FIRST_LINES.findall(stderr)), stderr
        elif status == 130:
            assert stderr == ("" if COMMANDS[command] else "federation: interrupted\n")
            assert COMMANDS[command] in stdout
        else:
            assert len(stderr.splitlines()) <= 1, "it had ended, with what it has to say"


def test_an_interrupt_that_became_another_error_is_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it comes while a class is made: Python 3.11 raises a RuntimeError from it."""

    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setattr("federation.base.settings.settings.Settings.load", interrupted)
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
