"""A forked process is, to the program it runs and to whoever started it, like one that began by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.patience import PATIENCE_SECONDS

TELL = """
import json, os, signal, sys, warnings
print(json.dumps({
    "argv": sys.argv, "path": sys.path[:3], "cwd": os.getcwd(), "environment": dict(os.environ), "parent": os.getppid(),
    "input": sys.stdin.read(), "files": sorted(os.listdir("/proc/self/fd")), "warnings": warnings.filters[0][0],
    "ctrl-c": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "name": __name__,
    "handled": [int(s) for s in signal.valid_signals() if signal.getsignal(s) not in (signal.SIG_DFL, signal.SIG_IGN)],
}))
print("told", file=sys.stderr)
sys.exit(3)
"""

END = """
import atexit, sys, threading
class Last:
    def __del__(self):
        sys.stderr.write("finalized ")
last = Last()
written = open("written", "w")
written.write("all of it")
atexit.register(print, "at the end")
threading.Thread(target=lambda: (threading.main_thread().join(), print("the thread"))).start()
"""


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_program_finds_what_it_would_find(tmp_path: Path, how: str) -> None:
    """Arguments, search path, directory, environment, streams, signals, warnings, open files and its parent."""
    (tmp_path / "tell.py").write_text(TELL)
    program = {"-c": ["-c", TELL], "-m": ["-m", "tell"], "script": ["tell.py"]}[how]
    environment = {"PYTHONPATH": str(warm.ROOT), "PYTHONWARNINGS": "error", "OWN": "1", "LC_CTYPE": "C.UTF-8"}
    truly, forked = (
        subprocess.run(
            [python, *program, "one", "two"],
            cwd=tmp_path,
            env=environment,
            input="given",
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        for python in (sys.executable, warm.PYTHON)
    )
    assert (forked.returncode, forked.stderr) == (truly.returncode, truly.stderr) == (3, "told\n")
    assert json.loads(forked.stdout) == json.loads(truly.stdout)


def test_an_error_is_told_and_sitecustomize_comes_first(tmp_path: Path) -> None:
    """As the interpreter does both."""
    (tmp_path / "sitecustomize.py").write_text("import federation\nfederation.customized = True\n")
    program = "import federation\nassert federation.customized\nraise LookupError('nothing')"
    command = [warm.PYTHON, "-c", program]
    environment = {"PYTHONPATH": f"{tmp_path}:{warm.ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "LookupError: nothing")


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(3)", "sys.exit('why')"])
def test_it_ends_in_order(tmp_path: Path, ending: str) -> None:
    """Threads are waited for, functions are called, files are written: as the interpreter does before it ends."""
    seen = []
    for number, python in enumerate((sys.executable, warm.PYTHON)):
        directory = tmp_path / str(number)
        directory.mkdir()
        command = [python, "-c", END + ending]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        seen.append((done.returncode, done.stdout, done.stderr, (directory / "written").read_text()))
    truly, forked = seen
    assert forked == truly
    assert "finalized" in forked[2]
    assert forked[3] == "all of it"


def test_output_that_cannot_be_written_is_told() -> None:
    """By the interpreter, with the status that it has for this."""
    environment = {"LC_CTYPE": "C.UTF-8"}  # nothing that has it written at once
    with open("/dev/full", "w") as full:
        truly, forked = (
            subprocess.run([python, "-c", "print(1)"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
            for python in (sys.executable, warm.PYTHON)
        )
    assert (forked.returncode, forked.stderr.splitlines()[-1]) == (truly.returncode, truly.stderr.splitlines()[-1])
    assert truly.returncode == 120


async def test_a_signal_ends_it() -> None:
    """And whoever waits for it, in an event loop as well, knows the signal."""
    process = await asyncio.create_subprocess_exec(warm.PYTHON, "-c", "import signal; signal.pause()")
    process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await process.wait() == -signal.SIGKILL


def test_what_a_fork_does_not_know_is_refused() -> None:
    """It would be a test of something else."""
    with pytest.raises(ValueError, match=r"start sys\.executable .* options of the interpreter; preexec_fn"):
        subprocess.run([warm.PYTHON, "-W", "error"], preexec_fn=os.getpid)
