"""What Spark's Python workers do between two tasks, made quick.

Before each task they read the directory of every archive on their path again, after each they collect garbage among all
that was ever imported: for reading a small table, nine tenths of their time (Python 3.11, Spark 4.1).
"""

from __future__ import annotations

import gc
import sys
from zipimport import zipimporter


def spare_worker() -> None:
    """The archives are forgotten until something is imported from them; what is imported now is never garbage."""
    for place, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[place]
    if gc.get_freeze_count() == 0:
        gc.freeze()


class SparesWorker:
    """Spares the worker that it arrives in."""

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        spare_worker()
