"""What stands before a storage and can do what that can."""

from __future__ import annotations

from typing import Self, cast

from workers.storage.base import Storage


class StandIn:
    """A storage that hands on what it is not to do in another way: subclasses define that.

    It says that it is of the class of the storage behind it, because `isinstance` decides which abilities the core uses
    (`workers.storage.abilities`), and from Python 3.12 on it does not see what only `__getattr__` finds.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property  # type: ignore[misc] # `object` lets it be set, which nobody does
    def __class__(self) -> type[Self]:
        return cast("type[Self]", type(self._storage))

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)
