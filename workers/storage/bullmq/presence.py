"""The connections on which the workers of a queue wait, by whose names Node counts its workers.

Theory of operation. `getWorkers` of Node looks through CLIENT LIST for `<prefix>:<queue name in base64>`, followed by
`:w:` and a worker's name. A worker has one such connection, as Node's have: the one on which it waits for a job. It is
kept while the worker is busy, for this queue alone, until the storage is given up.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from urllib.parse import quote

from redis import exceptions
from redis.asyncio.connection import AbstractConnection

from workers.homes import keep_inherited
from workers.storage.bullmq.access import QueueAccess
from workers.storage.on_redis.errors import good
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
