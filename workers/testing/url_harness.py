"""A harness for any storage with a URL, in real time."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from workers.storage import open_storage
from workers.storage.base import Limits, Storage
from workers.testing.harness import Harness


@runtime_checkable
class _Migrates(Protocol):
    async def migrate(self) -> None: ...


class UrlHarness(Harness):
    """The storage that a URL names, with leases and delays of 150 ms that are really waited for.

    Every case works on queues of its own, named `case-...`, and leaves them behind: use a database or a server that may
    be thrown away. Missing tables are created.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        # Kept as long as the harness: what storages on one URL share must not vanish between two clients.
        self._first = open_storage(url)

    @property
    def limits(self) -> Limits:
        return self._first.limits

    async def make(self, queue: str) -> Storage:
        return open_storage(self._url, queue=queue)

    async def prepare(self) -> None:
        """Connect once, creating missing tables.

        Raises:
            WorkersError: the storage does not exist, or cannot be used.
        """
        if isinstance(self._first, _Migrates):
            await self._first.migrate()
        await self._first.connect()
        await self._first.disconnect()
