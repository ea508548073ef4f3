"""The first program of each page about queues is short, and runs as it stands until it is stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import until
from tests.workers.manual import README, ROOT

PRINTED = {
    "README": "hello, bob",
    "enqueueing": "remember, 7",
    "failed": "",
    "handlers": "",
    "limits": "alice hello",
    "recurring": "",
    "storages": "hello, bob",
    "tasks": "remember, 3",
}


@pytest.mark.parametrize("page", PRINTED)
async def test_it_has_eight_lines_and_runs(page: str, tmp_path: Path) -> None:
    """Ctrl-C ends it gracefully."""
    path = README if page == "README" else ROOT / "docs" / "queue" / f"{page}.md"
    found = re.search(r"```python\n(.*?)```", path.read_text(), re.S)
    assert found is not None
    program = found[1].replace("file:///tmp/jobs", f"file://{tmp_path}/jobs")
    assert len([line for line in program.splitlines() if line.strip()]) <= 8
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    printed, log = tmp_path / "printed", tmp_path / "log"
    with printed.open("wb") as out, log.open("wb") as err:
        command = [sys.executable, "-u", "-c", program]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=err)
    try:
        await until(lambda: "is ready for the queue" in log.read_text() or process.poll() is not None)
        await until(lambda: PRINTED[page] in printed.read_text() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        await until(lambda: process.poll() is not None)
        assert process.returncode == 0, log.read_text()
        assert PRINTED[page] in printed.read_text()
    finally:
        process.kill()
        process.wait()
