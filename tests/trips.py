"""Which files of ours a trip passes, see "What a trip costs" in CONTRIBUTING.md."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType


@contextmanager
def entered_files(*packages: ModuleType) -> Iterator[set[str]]:
    """Collect their files of which a function is called, but for imports, here or in a thread that begins meanwhile."""
    ours = tuple(f"{Path(package.__file__ or '').parent}/" for package in packages)
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ours) and file not in entered and not _is_import(frame):
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
