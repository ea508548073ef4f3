"""What clients share: nobody takes more than a sixteenth of what there is for all.

Theory of operation. A request counts for its holders: its client, and the public network of that client (see
`Clients.source`). Who has its share waits a moment for what it gives back itself, so that an honest client with much to
do only gets slower. Where all is taken, places are refused, and memory is taken back from bodies that do not end (see
`bodies`). A request whose client cannot be known has no share, and competes for the whole.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Final

from federation.node.refusals import Refusal

SHARES: Final = 16
MAX_WAITING: Final = 8
"""How many requests of one client wait for a place at a time."""
PATIENCE: Final = timedelta(seconds=5)
"""How long they wait. Their senders wait ten or fifteen seconds for an answer."""
EVERYBODY: Final = ""
"""The name under which everything counts."""

_NO_BOUNDS: Mapping[str, int] = MappingProxyType({})


class Places:
    """Places for *most* requests under way, of which each client and each network has a sixteenth."""

    def __init__(self, most: int, *, full: Callable[[], Refusal], patience: timedelta = PATIENCE) -> None:
        self._most = most
        self._share = max(1, most // SHARES)
        self._full = full
        self._patience = patience.total_seconds()
        self._taken: Counter[str] = Counter()  # by holder
        self._kinds: Counter[str] = Counter()  # by what is bounded: a host's name may be the address of a client
        self._waiting: Counter[str] = Counter()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def place(self, holders: Sequence[str], bounds: Mapping[str, int] = _NO_BOUNDS) -> AsyncIterator[None]:
        """Take a place until the block ends. *bounds* say how many there are of its kinds, by their names.

        Raises:
            Refusal: the one of *full*: there is none, or the holders had their share for too long.
        """
        await self._wait(holders)
        bounds = {EVERYBODY: self._most, **bounds}
        if any(self._kinds[name] >= bound for name, bound in bounds.items()):
            raise self._full()
        with _counted(self._kinds, [*bounds]), _counted(self._taken, holders):
            try:
                yield
            finally:
                self._left.set()

    async def _wait(self, holders: Sequence[str]) -> None:
        if any(self._waiting[name] >= MAX_WAITING for name in holders):
            raise self._full()
        with _counted(self._waiting, holders):
            try:
                async with asyncio.timeout(self._patience):
                    while any(self._taken[name] >= self._share for name in holders):
                        self._left.clear()
                        await self._left.wait()
            except TimeoutError:
                raise self._full() from None


@contextmanager
def _counted(counter: Counter[str], names: Sequence[str]) -> Iterator[None]:
    counter.update(names)
    try:
        yield
    finally:
        counter.subtract(names)
        for name in names:
            if not counter[name]:
                del counter[name]
