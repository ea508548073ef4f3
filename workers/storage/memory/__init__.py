"""Jobs in this process alone: for tests, and as the reference for every other storage."""

from workers.storage.memory.storage import MemorySpace, MemoryStorage

__all__ = ["MemorySpace", "MemoryStorage"]
