"""The background loop beside forks."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_SECONDS

FORK = """
import asyncio, os, threading
from workers.background import background

begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

async def work():
    begun.set()
    await asyncio.to_thread(may_end.wait, 10)
    ended.set()

def let_it_end():  # called right before the loop's own handler, which was registered earlier
    may_end.set()

os.register_at_fork(before=let_it_end)
background.soon(work)
begun.wait()
child = os.fork()
if not child:
    os._exit(0 if ended.is_set() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_waits_for_what_is_under_way() -> None:
    """Else the child has a copy of the locks that it held, SQLite's among them, which nobody releases there."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")
