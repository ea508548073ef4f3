"""Kills a process before each of its operations on files, with a reader beside it, to see what it leaves."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import NoReturn

from tests.patience import LONG_PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]

OPERATIONS = ("os.", "open", "shutil.", "ctypes.dlsym")
"""What Python tells its hooks of; the system's `renameat2` is looked up before each call."""

LOOKS = ("os.scandir", "os.listdir")
"""These change nothing, and are more with every folder that was left empty."""

MOST_STEPS = 1000

PAUSE_SECONDS = 0.002
"""Between two looks of the reader, who is not to be all that the machine does."""

_left = 0


def run_apart(scenario: Callable[[Path], int], directory: Path) -> int:
    """What the scenario returns, in a process of its own, which may have hooks and forks."""
    module, name = scenario.__module__, scenario.__name__
    program = (
        f"import pathlib, sys; from {module} import {name} as scenario; print(scenario(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONG_PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def watch() -> None:
    """From now on this process, and those it forks, can be armed."""
    sys.addaudithook(_count_down)


def arm(step: int) -> None:
    """From now on, this process is killed before its `step`th operation."""
    global _left
    _left = step


def is_killed(act: Callable[..., None], *arguments: object) -> bool:
    """Whether a process that does this arms itself and dies; nothing else may go wrong in it."""
    child = os.fork()
    if not child:
        _end_after(lambda: act(*arguments))
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL), ended
    return ended != 0


@contextlib.contextmanager
def read_meanwhile(look: Callable[[], Hashable]) -> Iterator[None]:
    """Another process looks again and again: it may find nothing that is wrong, and not the same all the time."""
    reading, writing = os.pipe()
    reader = os.fork()
    if not reader:
        os.close(writing)

        def read() -> None:
            found = set()
            while not select.select([reading], [], [], PAUSE_SECONDS)[0]:
                found.add(look())
            assert len(found) > 1, found

        _end_after(read)
    os.close(reading)
    try:
        yield
        os.close(writing)
    except BaseException:
        os.kill(reader, signal.SIGKILL)  # it may be looking for what will never be there
        raise
    finally:
        ended = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    assert ended == 0, ended


def _end_after(act: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        act()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _count_down(event: str, _arguments: object) -> None:
    global _left
    if _left and event.startswith(OPERATIONS) and event not in LOOKS:
        _left -= 1
        if not _left:
            os.kill(os.getpid(), signal.SIGKILL)
