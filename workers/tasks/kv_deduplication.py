"""Deduplication beside a queue that has none: a mark in a key-value store.

Theory of operation. A mark is the id of the first job enqueued with its key, which no other job ever has. Setting it is
one atomic step, so of many callers one goes on to enqueue. What can happen between the two steps:

- The enqueue fails or is cancelled: the mark is taken back, if it is still this caller's. The same happens when setting
  it failed without an answer, because it may have been set.
- Taking it back fails too, or the process dies: the mark stays until its time is over, and blocks the key until then.
- The enqueue fails without an answer although the job was stored: the mark is taken back anyway, and a second job may
  follow. Losing a job would be worse.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

from workers.errors import StorageUnavailable
from workers.kv.base import ConditionalKvStore

T = TypeVar("T")

ANSWER_SECONDS: Final = 10.0
"""How long the store may take to answer one call."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvDeduplication:
    """Deduplication marks under `prefix` in a store that others may use too."""

    kv: ConditionalKvStore
    prefix: tuple[str, ...]

    async def once(
        self, key: tuple[str, ...], mark: str, ttl: timedelta, enqueue: Callable[[], Awaitable[object]]
    ) -> str | None:
        """Set the mark of the key and call `enqueue`, or return the mark that the key has already.

        Raises:
            Exception: whatever `enqueue` raised; the mark has been taken back.
            StorageUnavailable: the store did not answer.
        """
        place, token = (*self.prefix, *key), mark.encode()
        try:
            found = await _to_the_end(self.kv.set_if_absent(place, token, ttl=ttl))
            if found is not None and found != token:  # its own: a store may repeat a call
                return found.decode(errors="backslashreplace")
            await enqueue()
        except (Exception, asyncio.CancelledError):
            await self._take_back(place, token)
            raise
        return None

    async def _take_back(self, place: tuple[str, ...], token: bytes) -> None:
        try:
            await _to_the_end(self.kv.compare_and_delete(place, token))
        except Exception as error:
            _LOG.warning("the mark %r could not be taken back (%s); it will expire", place, type(error).__name__)


async def _to_the_end(work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`.

    A cancellation is raised only once it has ended, so that none of it happens later.
    """
    task = asyncio.ensure_future(_bounded(work))
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        if not task.cancelled():
            task.exception()  # looked at, or asyncio would complain
        raise cancellation
    return task.result()


async def _bounded(work: Coroutine[object, object, T]) -> T:
    try:
        async with asyncio.timeout(ANSWER_SECONDS) as scope:
            return await work
    except TimeoutError as error:
        if scope.expired():
            raise StorageUnavailable(f"the KV store did not answer within {ANSWER_SECONDS:g} s") from error
        raise
