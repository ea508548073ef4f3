"""Speeds up what Spark's Python workers do between two tasks.

Before each task they read the directory of every archive on their path again, and after each they collect garbage among
all that was ever imported. For reading a small table, that is nine tenths of their time (Python 3.11, Spark 4.1).
"""

from __future__ import annotations

import gc
import sys
from typing import Final
from zipimport import zipimporter

_MANY: Final = 10_000
"""More objects than tasks leave behind; imports do."""


def spare_worker() -> None:
    """Forget the archives until something is imported from them.

    What is imported now is exempt from garbage collection.
    """
    for place, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[place]
    # What is exempt already is not counted here: to count it would take as long as to look through it.
    if len(gc.get_objects(generation=2)) > _MANY:
        gc.freeze()


class SparesWorker:
    """A base class that speeds up the worker in which it is unpickled."""

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        spare_worker()
