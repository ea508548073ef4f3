"""What belongs to a process as a whole."""

from __future__ import annotations

import subprocess
import sys


def test_what_is_loaded_is_no_affair_of_the_garbage_collector() -> None:
    """It is frozen, and what comes after it still collected."""
    program = """
import gc, weakref
from federation.process import set_aside_loaded

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
