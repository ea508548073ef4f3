"""What stands before a storage and can do what that can."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Self, TypeAlias, cast

from workers.storage.base import Storage

Method: TypeAlias = Callable[..., Awaitable[object]]


class StandIn:
    """A storage that hands on what subclasses do not do in another way; all that is awaited goes `_through` one method.

    It says that it is of the class of the storage behind it, because `isinstance` decides which abilities the core uses
    (`workers.storage.abilities`), and from Python 3.12 on it does not see what only `__getattr__` finds.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property  # type: ignore[misc] # `object` lets it be set, which nobody does
    def __class__(self) -> type[Self]:
        return cast("type[Self]", type(self._storage))

    def __getattr__(self, verb: str) -> object:
        member: object = getattr(self._storage, verb)
        if not inspect.iscoroutinefunction(member):
            return member

        async def call(*args: object, **options: object) -> object:
            return await self._through(verb, member, args, options)

        return call

    async def _through(
        self, verb: str, method: Method, args: tuple[object, ...], options: Mapping[str, object]
    ) -> object:
        """Call the storage's method of that name: as it is, or in the subclass's way."""
        return await method(*args, **options)
