"""What belongs to a process as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests import warm
from tests.patience import PATIENCE_SECONDS


def test_what_is_loaded_is_no_affair_of_the_garbage_collector() -> None:
    """It is frozen, and what comes after it still collected."""
    program = """
import gc, weakref
from federation.runtime.nodes import set_aside_loaded

class Knot:
    def __init__(self):
        self.self = self

set_aside_loaded()
assert gc.get_freeze_count() > 10_000
knot = weakref.ref(Knot())
gc.collect()
assert knot() is None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


LIMITS = """
import asyncio, json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(json.loads(sys.argv[1])))
from structlog.testing import capture_logs
from federation.runtime.composition import Federation
from federation.base.settings.settings import Settings
from federation.runtime.workers import FederationWorkers

async def main():
    federation = Federation(Settings.from_values({"DATABASE_URL": "sqlite:///" + sys.argv[2]}))
    workers = FederationWorkers(federation)
    with capture_logs() as logs:
        workers.start()
    workers.request_stop()
    await asyncio.gather(workers.stop(), return_exceptions=True)
    await federation.close()
    return [log for log in logs if log["event"] == "too_few_descriptors"]

logs = asyncio.run(main())
print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), logs]))
"""


def started_with(soft: int, hard: int, database: Path) -> tuple[list[int], list[dict[str, object]]]:
    """The limits of open files, soft and hard, once workers have started, and what they complained of."""
    command = [warm.PYTHON, "-c", LIMITS, json.dumps([soft, hard]), str(database)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    limits, logs = json.loads(done.stdout.splitlines()[-1])
    return limits, logs


def test_workers_raise_the_limit_of_open_files_as_far_as_they_need(database_file: Path) -> None:
    """And no further; a higher one stays."""
    (soft, hard), complaints = started_with(256, 4_096, database_file)
    assert (1_024 < soft < 4_096, hard, complaints) == (True, 4_096, [])
    assert started_with(4_000, 4_096, database_file) == ([4_000, 4_096], [])


def test_too_low_a_hard_limit_of_open_files_is_complained_of(database_file: Path) -> None:
    """All that is allowed is taken, and the log says what to raise or to lower."""
    limits, (complaint,) = started_with(256, 900, database_file)
    assert (limits, complaint["allowed"]) == ([900, 900], 900)
    assert "FEDERATION_OVERTIME" in str(complaint["advice"])
