"""The manual of the queue core says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from workers.lifecycle import diagram

README = Path(__file__).resolve().parents[2] / "workers" / "README.md"


def test_the_diagram_is_generated_from_the_table() -> None:
    """The state diagram in the README is exactly what `lifecycle.diagram()` prints."""
    shown = re.search(r"<!-- diagram -->\n```mermaid\n(.*?)\n```\n<!-- /diagram -->", README.read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1] == diagram()


def test_the_example_runs(tmp_path: Path) -> None:
    """The README's first example runs as it stands and delivers."""
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", example[1]],
        cwd=tmp_path,
        env={"PYTHONPATH": str(README.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "1 {'to': 'bob'}" in finished.stdout


def test_the_tasks_example_runs(tmp_path: Path) -> None:
    """The README's tasks run as they stand, each once per key."""
    example = re.search(r"## Tasks.*?```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", example[1]],
        cwd=tmp_path,
        env={"PYTHONPATH": str(README.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    printed = finished.stdout.splitlines()
    assert "queued duplicate True" in printed
    assert [line for line in printed if "digest" in line] == [f"digest for {who}" for who in ("bob", "carol", "dave")]


def test_a_storage_of_ones_own_is_certified_as_shown(tmp_path: Path) -> None:
    """The README's way to certify a storage runs as it stands and prints a certificate."""
    example = re.search(r"## Certify a storage.*?```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    storage = (
        "from workers.storage.memory import MemoryStorage\n"
        "from workers.storage.memory_space import MemorySpace\n"
        "space = MemorySpace()\n"
        "class MyStorage(MemoryStorage):\n"
        "    def __init__(self, url, queue): super().__init__(space, queue)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", storage + example[1]],
        cwd=tmp_path,
        env={"PYTHONPATH": str(README.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "certified: none of" in finished.stdout
