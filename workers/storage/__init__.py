"""The storages of jobs: the contract in `base`, a package for each, and `open_storage`, which picks one by URL."""

from workers.storage.urls import open_storage

__all__ = ["open_storage"]
