"""Claims whose answer did not arrive: they are given back before the next ones of their queue are made.

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
    """What the tokens of claims have in common that were not read; `lost` is what such a claim raises.

    Any thread may use it.
    """

    def __init__(self, lost: type[Exception] = StorageUnavailable) -> None:
        self._lost = lost
        self._heads: deque[S] = deque(maxlen=_MOST)

    @contextmanager
    def claiming(self, head: S) -> Iterator[None]:
        """Note a claim whose answer is not read in this context."""
        try:
            yield
        except self._lost:
            self._heads.append(head)
            raise

    def take(self) -> S | None:
        """Return one that was noted, which is noted no longer; None if there is none."""
        try:
            return self._heads.popleft()
        except IndexError:
            return None

    async def give_back(self, release: Callable[[S], Awaitable[object]]) -> None:
        """Release what was claimed and not read.

        Raises:
            StorageUnavailable: it will be tried again.
        """
        while (head := self.take()) is not None:
            with self.claiming(head):
                await release(head)
