"""How a process logs at its most talkative."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.federation.test_run import ROOT
from tests.patience import PATIENCE_SECONDS

SECRET = "the-secret"
PROGRAM = """
import logging, sys
import structlog
from federation.base.logs import configure_logging

configure_logging("debug")
logging.getLogger("aiosqlite").debug("executing %s", "INSERT " + sys.argv[1])
logging.getLogger("aiosqlite").info("executing %s", "INSERT " + sys.argv[1])
logging.getLogger("aiosqlite").warning("a warning")
structlog.get_logger().debug("ours")
secret = sys.argv[1]
try:
    try:
        raise ValueError(secret)
    except ValueError as cause:
        raise ExceptionGroup(secret, [LookupError(secret)]) from cause
except ExceptionGroup:
    structlog.get_logger().exception("failed")
    logging.getLogger("asyncio").exception("a library failed")
"""
"""It gets the secret as an argument: from Python 3.13 on a traceback shows the lines of a program given by `-c`."""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, SECRET]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)


def test_libraries_do_not_say_what_they_do_even_at_debug() -> None:
    """Drivers would log statements with their values; of an exception neither message nor variable is shown, whoever
    logs it."""
    finished = run(PROGRAM)
    lines = [json.loads(line) for line in finished.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["a warning", "ours", "failed", "a library failed"]
    for line in lines[-2:]:
        assert "line 16, in <module>\n" in line["exception"]
        assert [each for each in line["exception"].splitlines() if each[0] != " "] == [
            "ValueError",
            "ExceptionGroup",
            "LookupError",
        ]
    assert SECRET not in finished.stderr
    assert finished.stdout == ""


def test_a_person_sees_the_same_of_a_crash() -> None:
    """On a terminal, too: the frames and the classes, and no message."""
    program = f"import sys; sys.stderr.isatty = lambda: True\n{PROGRAM}"
    finished = run(program)
    assert "LookupError\n" in finished.stderr
    assert "a library failed" in finished.stderr
    assert SECRET not in finished.stderr


def test_who_logs_goes_on_when_nobody_reads_it() -> None:
    """As behind `federation workers run 2>&1 | head`: what is told to stop would say so first, and never stop."""
    program = """
import logging, os, sys
import structlog
from federation.base.logs import configure_logging

reading, writing = os.pipe()
os.dup2(writing, 2)
os.close(reading)
configure_logging()
for _ in range(3):
    structlog.get_logger().error("stopping")
    logging.getLogger("asyncio").error("a library")
print("stopped", flush=True)
os._exit(0)
"""
    assert run(program).stdout == "stopped\n"
