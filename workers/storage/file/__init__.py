"""Jobs in a directory of this machine, with nothing but the standard library."""

from workers.storage.file.storage import FileStorage

__all__ = ["FileStorage"]
