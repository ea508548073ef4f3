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
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final, TypeAlias

from workers.errors import StorageError, StorageUnavailable, WorkersError
from workers.retry import Backoff
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.presence import Presence
from workers.storage.bullmq.scripts import READY_MARKER
from workers.storage.bullmq.server import Reply, ask, to_the_end
from workers.storage.on_redis.node_values import due_ms, number, whole

LOOK_SECONDS: Final = 10.0
BARRED_LOOK_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.002
LONGEST_PAUSE_SECONDS: Final = 1.0
SERVER_SLACK_SECONDS: Final = 1.0
"""Servers end blocking commands up to 0.1 s late, so waiters end them themselves; this is the safety net."""
ANSWER_SECONDS: Final = 2.0

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
