"""How a process logs at its most talkative."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.federation.test_run import ROOT
from tests.patience import PATIENCE_SECONDS

PROGRAM = """
import logging
import structlog
from federation.base.logs import configure_logging

configure_logging("debug")
logging.getLogger("aiosqlite").debug("executing %s", "INSERT the-secret")
logging.getLogger("aiosqlite").info("executing %s", "INSERT the-secret")
logging.getLogger("aiosqlite").warning("a warning")
structlog.get_logger().debug("ours")
secret = "the-secret"
try:
    try:
        raise ValueError("the-secret")
    except ValueError as cause:
        raise ExceptionGroup("the-secret", [LookupError("the-secret")]) from cause
except ExceptionGroup:
    structlog.get_logger().exception("failed")
    logging.getLogger("asyncio").exception("a library failed")
"""


def test_libraries_do_not_say_what_they_do_even_at_debug() -> None:
    """Drivers would log statements with their values; of an exception neither message nor variable is shown, whoever
    logs it."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    lines = [json.loads(line) for line in finished.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["a warning", "ours", "failed", "a library failed"]
    for line in lines[-2:]:
        assert "line 16, in <module>\n" in line["exception"]
        assert [each for each in line["exception"].splitlines() if each[0] != " "] == [
            "ValueError",
            "ExceptionGroup",
            "LookupError",
        ]
    assert "the-secret" not in finished.stderr
    assert finished.stdout == ""


def test_a_person_sees_the_same_of_a_crash() -> None:
    """On a terminal, too: the frames and the classes, and no message."""
    program = f"import sys; sys.stderr.isatty = lambda: True\n{PROGRAM}"
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert "LookupError\n" in finished.stderr
    assert "a library failed" in finished.stderr
    assert "the-secret" not in finished.stderr
