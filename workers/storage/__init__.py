"""The storages of jobs: the contract in `base`, a package for each, and `open_storage`, which picks one by URL."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.storage.urls import open_storage

__all__ = ["open_storage"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import `open_storage` when it is first used: who reads a URL by `redis_urls` needs no storage."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from workers.storage import urls

        globals()[name] = urls.open_storage
        return urls.open_storage
