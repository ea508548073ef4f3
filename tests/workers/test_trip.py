"""How many of our files a job passes from its enqueue to its settlement, see "What a trip costs" in CONTRIBUTING.md."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

import workers
from tests.workers.conftest import ORDINARY
from tests.workers.harnesses import HARNESSES
from workers import Job, Queue, Worker

_OURS: Final = f"{Path(workers.__file__).parent}/"


@contextmanager
def entered_files() -> Iterator[set[str]]:
    """Collect our files of which a function is called, but for imports, here or in a thread that begins meanwhile."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_OURS) and file not in entered and not _is_import(frame):
            entered.add(file)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _is_import(frame: FrameType | None) -> bool:
    while frame is not None and "importlib" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize(("name", "most"), [("memory", 34), ("sqlite", 48), ("postgres", 49)])
async def test_a_job_passes_few_files(name: str, most: int, request: pytest.FixtureRequest) -> None:
    """A file that a job passes anew raises the figure here and in CONTRIBUTING.md, or belongs to one that it passes."""
    async with HARNESSES[name](ORDINARY, request) as harness:
        storage = await harness.make("trip")

        async def handle(job: Job) -> None:
            worker.stop()

        worker = Worker(storage, {"job": handle})
        with entered_files() as entered:
            await Queue(storage).enqueue({}, name="job")
            await worker.run()
    assert len(entered) <= most, sorted(entered)
