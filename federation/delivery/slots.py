"""How many attempts one server may have at once, so that a hanging one never holds every worker slot.

Theory of operation. Each server has `per_server` slots in this process. Who finds them taken waits for one, but no
longer than `QUICK`: a healthy server is kept busy that way. Then the job is parked: it goes back to the queue for about
a second, and the worker's own slot is free for another server. A server that kept somebody waiting in vain, or took
longer than `QUICK` over an attempt, is slow: behind its attempts nobody waits, all are parked at once, until one of
them is quick. So a server that hangs costs each worker slot `QUICK` once.

Each return of a parked job costs the queue a claim. Beyond `RETURNS_PER_SECOND` jobs parked for one server they stay
away longer, so that a backlog of thousands to a dead server does not crowd out the others by coming and going.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Final

from federation.delivery.errors import Parked

QUICK: Final = timedelta(milliseconds=250)
RETURNS_PER_SECOND: Final = 200
LONGEST_PARKING_SECONDS: Final = 30.0
MAX_REMEMBERED: Final = 10_000


@dataclass(slots=True)
class _Server:
    used: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class ServerSlots:
    """At most `per_server` attempts at one server at a time in this process."""

    def __init__(self, per_server: int) -> None:
        self._per_server = per_server
        self._servers: dict[str, _Server] = {}  # those with attempts under way
        self._slow: OrderedDict[str, None] = OrderedDict()
        self._parked: OrderedDict[str, str] = OrderedDict()  # deliveries and their servers
        self._parked_at: Counter[str] = Counter()  # the same, by server

    @asynccontextmanager
    async def take(self, server_url: str, delivery_id: str) -> AsyncIterator[None]:
        """Hold one of the server's slots.

        Raises:
            Parked: all are taken, and waiting did not help or would not.
        """
        server = self._servers.setdefault(server_url, _Server())
        if server.used < self._per_server:
            server.used += 1
        else:
            await self._wait(server, server_url)
        self.forget_parked(delivery_id)
        started = monotonic()
        try:
            yield
        finally:
            self._judge(server_url, timedelta(seconds=monotonic() - started))
            self._release(server, server_url)

    def note_parked(self, server_url: str, delivery_id: str) -> bool:
        """Whether this is the first time the delivery is parked since it last had a slot.

        A job waiting behind a hanging server is parked every second; the attempt log wants to know once.
        """
        if delivery_id in self._parked:
            return False
        self._parked[delivery_id] = server_url
        self._parked_at[server_url] += 1
        if len(self._parked) > MAX_REMEMBERED:
            self.forget_parked(next(iter(self._parked)))
        return True

    def forget_parked(self, delivery_id: str) -> None:
        """The delivery waits no more."""
        server_url = self._parked.pop(delivery_id, None)
        if server_url is not None:
            self._parked_at[server_url] -= 1
            if not self._parked_at[server_url]:
                del self._parked_at[server_url]

    async def _wait(self, server: _Server, server_url: str) -> None:
        """Return with a slot handed over by an attempt that ended."""
        if server_url in self._slow:
            raise self._park(server_url)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        server.waiting.append(turn)
        try:
            async with asyncio.timeout(QUICK.total_seconds()):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # the slot came just as we gave up: it is ours to pass on
                self._release(server, server_url)
            if isinstance(error, TimeoutError):
                self._note_slow(server_url)
                raise self._park(server_url) from None
            raise

    def _release(self, server: _Server, server_url: str) -> None:
        while server.waiting:
            turn = server.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        server.used -= 1
        if not server.used:
            del self._servers[server_url]

    def _judge(self, server_url: str, took: timedelta) -> None:
        if took < QUICK:
            self._slow.pop(server_url, None)
        else:
            self._note_slow(server_url)

    def _note_slow(self, server_url: str) -> None:
        self._slow[server_url] = None
        if len(self._slow) > MAX_REMEMBERED:
            self._slow.popitem(last=False)

    def _park(self, server_url: str) -> Parked:
        seconds = min(max(1.0, self._parked_at[server_url] / RETURNS_PER_SECOND), LONGEST_PARKING_SECONDS)
        # Spread, so that parked jobs do not all come back in the same moment.
        return Parked(server_url, timedelta(seconds=seconds * random.uniform(0.75, 1.25)))  # noqa: S311 - guards nothing
