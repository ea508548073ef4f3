"""How a process logs at its most talkative."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.federation.test_cli import ROOT

PROGRAM = """
import logging
import structlog
from federation.logs import configure_logging

configure_logging("debug")
logging.getLogger("aiosqlite").debug("executing %s", "INSERT the-secret")
logging.getLogger("aiosqlite").info("executing %s", "INSERT the-secret")
logging.getLogger("aiosqlite").warning("a warning")
structlog.get_logger().debug("ours")
secret = "the-secret"
try:
    raise LookupError("broke")
except LookupError:
    structlog.get_logger().exception("failed")
"""


def test_libraries_do_not_say_what_they_do_even_at_debug() -> None:
    """Drivers would log statements with their values; of an exception no variable is shown."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    lines = [json.loads(line) for line in finished.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["a warning", "ours", "failed"]
    assert "LookupError" in lines[-1]["exception"]
    assert "the-secret" not in finished.stderr
    assert finished.stdout == ""
