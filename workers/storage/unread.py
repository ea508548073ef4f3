"""Claims whose answer did not arrive: they are given back before the next ones are made.

Theory of operation. A storage chooses what the tokens of a claim begin with, so it can find the jobs that were claimed
although nobody was told. Otherwise these wait for the end of their leases, and an attempt is counted that nobody made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from workers.errors import StorageUnavailable

S = TypeVar("S")

_MOST: Final = 10
"""Those before the last ones come back when their leases end."""


class Unread(Generic[S]):
    """What the tokens of claims begin with that were not read; `give_back` releases what was claimed by one."""

    def __init__(self, give_back: Callable[[S], Awaitable[object]]) -> None:
        self._give_back = give_back
        self._heads: deque[S] = deque(maxlen=_MOST)

    @contextmanager
    def claiming(self, head: S) -> Iterator[None]:
        """Note a claim whose answer is not read in this context."""
        try:
            yield
        except StorageUnavailable:
            self._heads.append(head)
            raise

    async def give_back(self) -> None:
        """Release what was claimed and not read.

        Raises:
            StorageUnavailable: it will be tried again.
        """
        while self._heads:
            head = self._heads.popleft()
            with self.claiming(head):
                await self._give_back(head)
