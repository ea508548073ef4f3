"""Where jobs live: one contract in `base`, one storage per module, and `open_storage` to pick one by URL."""

from workers.storage.urls import open_storage

__all__ = ["open_storage"]
