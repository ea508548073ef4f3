"""Whether an application's source has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_NOT_SOURCES: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


class Sources:
    """The `.py` files below `directory`, those of environments and hidden folders left out."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._seen = self._look()

    def changed(self) -> bool:
        """Return whether one was written, added or removed since the last call."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> dict[str, int]:
        return dict(self._files())

    def _files(self) -> Iterator[tuple[str, int]]:
        for folder, folders, files in os.walk(self._directory):
            folders[:] = [name for name in folders if name not in _NOT_SOURCES and not name.startswith(".")]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    try:
                        yield path, os.stat(path).st_mtime_ns
                    except OSError:  # removed meanwhile
                        continue
