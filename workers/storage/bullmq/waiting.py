"""Waiting for a job on BullMQ's marker, without losing the marker.

Theory of operation. Each script that makes a job claimable puts a member into the marker set. A waiter pops it with
BZPOPMIN, so each marker wakes one waiter, and every claim puts one back for the next. The member `0` means "claim now";
any other has as its score the time at which the next delayed job is due. Two rules keep wake-ups from getting lost:

* A waiter that popped a marker and will not claim puts it back: one that is cancelled, and one that popped a future
  time and leaves before. A cancelled waiter first ends its BZPOPMIN with CLIENT UNBLOCK and reads the answer; closing
  the connection instead could leave a marker popped for nobody.
* A waiter killed with a popped marker cannot put it back. So before it blocks, and every 10 s, each waiter looks at the
  queue itself.

A queue may have jobs that nobody may claim: it is paused, as many run as it allows, or its rate limit is reached. Then
a marker says little, because every claim by anybody puts one back. So the waiter looks again before it returns, less
often the more markers came to nothing. Who resumes a queue, or frees a slot of ours, leaves a marker (`lua/wake.lua`);
a rate limit's end is known. Who only changes a limit leaves none, so that the waiter looks every 5 s, as Node does.

`getWorkers` of Node looks through CLIENT LIST for `<prefix>:<queue name in base64>`, followed by `:w:` and a worker's
name. A worker has one such connection, as Node's have: the one on which it waits for a job. It is kept while the worker
is busy, for this queue alone, until the storage is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import quote

from redis import exceptions
from redis.asyncio.connection import AbstractConnection

from workers.errors import StorageError, StorageUnavailable, WorkersError
from workers.homes import keep_inherited
from workers.retry import Backoff
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.scripts import READY_MARKER
from workers.storage.bullmq.server import Reply, ask, to_the_end
from workers.storage.on_redis.errors import good
from workers.storage.on_redis.node_values import due_ms, number, whole
from workers.storage.on_redis.wire import read_replies

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 2.0
PLAIN: Final = "!#$&'()*+,/:;=?@[]"
"""What a client's name may hold beside letters, digits and `-._~`; all the rest is percent-encoded."""


class Presence:
    """The waiting connections of one queue's workers in this process."""

    def __init__(self, queue: QueueAccess, prefix: str, name: str) -> None:
        self._queue = queue
        self._name = f"{prefix}:{b64encode(name.encode()).decode()}"
        self._free: list[tuple[AsyncExitStack, AbstractConnection]] = []
        self._forbidden = False  # told once

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[AbstractConnection, int]]:
        """Borrow a connection to wait on, and its number at the server; one that an error leaves is closed."""
        held, connection, number = await self._kept() or await self._new()
        async with held:
            yield connection, number
            self._free.append((held.pop_all(), connection))

    async def _kept(self) -> tuple[AsyncExitStack, AbstractConnection, int] | None:
        """Return one on which somebody has waited before, unless the server has closed them all meanwhile."""
        while self._free:
            held, connection = self._free.pop()
            try:
                return held, connection, await self._introduce(connection)
            except (exceptions.RedisError, OSError):
                await _drop(held, connection)
            except BaseException:
                await _drop(held, connection)
                raise
        return None

    async def _new(self) -> tuple[AsyncExitStack, AbstractConnection, int]:
        async with AsyncExitStack() as held:
            connection = await held.enter_async_context(self._queue.server.connection())
            number = await self._introduce(connection)
            return held.pop_all(), connection, number

    async def _introduce(self, connection: AbstractConnection) -> int:
        """Name the connection, and return its number."""
        naming = ("CLIENT", "SETNAME", self._client_name())
        async with asyncio.timeout(ANSWER_SECONDS):
            named, number = await read_replies(connection, [naming, ("CLIENT", "ID")])
        self._note(named)
        return int(good(number))

    def _client_name(self) -> str:
        worker = self._queue.last_claimer
        return f"{self._name}:w:{quote(worker, safe=PLAIN)}" if worker else self._name

    def _note(self, named: object) -> None:
        if isinstance(named, exceptions.RedisError) and not self._forbidden:
            self._forbidden = True
            logger.debug("Node's getWorkers will not see this worker: CLIENT SETNAME was refused (%s)", named)

    async def leave(self) -> None:
        """Close the connections on which nobody waits."""
        while self._free:
            await _drop(*self._free.pop())

    def forget(self) -> None:
        """Forget the event loop, which is gone with its connections."""
        keep_inherited(self._free)
        self._free = []


async def _drop(held: AsyncExitStack, connection: AbstractConnection) -> None:
    await connection.disconnect(nowait=True)
    await held.aclose()


LOOK_SECONDS: Final = 10.0
BARRED_LOOK_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.002
LONGEST_PAUSE_SECONDS: Final = 1.0
SERVER_SLACK_SECONDS: Final = 1.0
"""Servers end blocking commands up to 0.1 s late, so waiters end them themselves; this is the safety net."""

Marker: TypeAlias = tuple[str, float]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Whether something can be claimed now, and after how many milliseconds that changes at the latest."""

    claimable: bool
    changes_in_ms: float = float("inf")
    barred: bool = False
    """Whether nothing may be claimed, whatever waits."""


class Waiter:
    """Waits on one queue, in any number of calls at once."""

    def __init__(self, queue: QueueAccess, presence: Presence) -> None:
        self._queue = queue
        self._presence = presence
        self._lua = queue.lua

    async def wait(self, seconds: float) -> None:
        """See `Storage.wait`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        held: Marker | None = None
        vain = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        try:
            while (left := deadline - clock()) > 0:
                outlook = await self._look()
                if outlook.claimable:
                    held = None  # the claim that follows moves every due job and marks the next
                    return
                look_again = BARRED_LOOK_SECONDS if outlook.barred else LOOK_SECONDS
                popped = await self._pop(min(left, look_again, outlook.changes_in_ms / 1000))
                if not _ready(popped):
                    held = held if _ready(held) else popped or held
                elif outlook.barred:
                    held = popped
                    await asyncio.sleep(min(vain.pause(), outlook.changes_in_ms / 1000))
                else:
                    return
        finally:
            if held is not None:
                await self._put_back(held)

    async def _look(self) -> Outlook:
        now_ms = self._queue.now_ms()
        replies = await self._queue.server.run(
            [
                ("HMGET", self._lua["meta"], "paused", "concurrency", "max"),
                ("LLEN", self._lua["active"]),
                ("LLEN", self._lua["wait"]),
                ("ZCARD", self._lua["prioritized"]),
                ("ZRANGE", self._lua["delayed"], 0, 0, "WITHSCORES"),
                ("GET", self._lua["limiter"]),
                ("PTTL", self._lua["limiter"]),
            ]
        )
        for reply in replies:
            if isinstance(reply, StorageError):
                raise reply
        (paused, concurrency, rate), active, waiting, prioritized, delayed, started, limited_ms = replies
        if paused is not None or (concurrency is not None and active >= whole(concurrency)):
            return Outlook(False, barred=True)
        if rate is not None and limited_ms > 0 and whole(started) >= whole(rate):
            return Outlook(False, limited_ms, barred=True)
        due = due_ms(delayed[1]) if delayed else None
        due_in_ms = float("inf") if due is None else due - now_ms
        return Outlook(waiting + prioritized > 0 or due_in_ms <= 0, due_in_ms)

    async def _pop(self, seconds: float) -> Marker | None:
        """Return the next marker, None after `seconds`. A cancelled call has popped nothing."""
        async with self._presence.connection() as (connection, client_id):
            pop = ("BZPOPMIN", self._lua["marker"], f"{seconds + SERVER_SLACK_SECONDS:.3f}")
            # A task of its own from the first byte on, so that the answer to what was sent is always read.
            answer = asyncio.ensure_future(ask(connection, pop))
            try:
                await asyncio.wait([answer], timeout=seconds)
                await self._unblock(answer, client_id)
            except asyncio.CancelledError:
                await to_the_end(self._call_off(answer, client_id))
                raise
            except WorkersError:
                await _abandon(answer)
                raise
            return _marker(answer.result())

    async def _unblock(self, answer: asyncio.Future[Reply], client_id: int) -> None:
        """Make the server answer the blocking command."""
        if not answer.done():
            await self._queue.server.run([("CLIENT", "UNBLOCK", client_id)])
            await asyncio.wait([answer], timeout=ANSWER_SECONDS)
        if not answer.done():
            raise StorageUnavailable("the Redis server did not end a wait when it was told to")

    async def _call_off(self, answer: asyncio.Future[Reply], client_id: int) -> None:
        """End the command and put back what it popped; a marker too many only wakes somebody for nothing."""
        with contextlib.suppress(WorkersError):
            await self._unblock(answer, client_id)
        await _abandon(answer)
        known = not answer.cancelled() and answer.exception() is None
        popped = _marker(answer.result()) if known else (READY_MARKER, 0.0)
        if popped is not None:
            await self._put_back(popped)

    async def _put_back(self, marker: Marker) -> None:
        with contextlib.suppress(WorkersError):  # the server is gone; other waiters look by themselves
            await self._queue.server.run([self._lua.mark(*marker)])


def _ready(marker: Marker | None) -> bool:
    return marker is not None and marker[0] == READY_MARKER


def _marker(popped: Reply) -> Marker | None:
    return None if popped is None else (str(popped[1]), number(popped[2]) or 0.0)


async def _abandon(answer: asyncio.Future[Reply]) -> None:
    """Read the answer, or give it up."""
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
