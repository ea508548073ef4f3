"""A queue for plain code: threads, scripts and web frameworks without an event loop.

The calls of `workers.Queue`, without `await`. Jobs of a caller's transaction go over its own connection, in the calling
thread; everything else is done by one background loop per process, for which the calling thread waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Self, Unpack
from weakref import finalize

from workers.background import background
from workers.jobs import CancelResult, JobState, JobStatus
from workers.queue import Queue as AsyncQueue
from workers.serde import Serde
from workers.specs import DEFAULT_NAME, Enqueued, JobOptions, JobSpec
from workers.storage.base import Storage

__all__ = ["Queue"]


class Queue:
    """Enqueues jobs to `storage` and asks about them; safe from any thread, and after a fork.

    The storage is this queue's alone: an asynchronous `Queue` needs one of its own. It is connected by the first call
    that needs that, and disconnected by `close`, by the end of a `with` block, or when nobody holds the queue any more.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        payload_serde: Serde | None = None,
        result_serde: Serde | None = None,
        max_attempts: int = 3,
        result_ttl: timedelta | int = timedelta(hours=1),
    ) -> None:
        self._queue = AsyncQueue(
            storage,
            payload_serde=payload_serde,
            result_serde=result_serde,
            max_attempts=max_attempts,
            result_ttl=result_ttl,
        )
        self._let_go = finalize(self, _let_go, self._queue)
        self._let_go.atexit = False  # the background loop closes it at the interpreter's end

    @property
    def storage(self) -> Storage:
        return self._queue.storage

    def enqueue(
        self,
        payload: object,
        *,
        name: str = DEFAULT_NAME,
        connection: object | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """See `workers.Queue.enqueue`; `connection` is a synchronous SQLAlchemy `Connection` or `Session`."""
        return self.enqueue_many([JobSpec(payload=payload, name=name, **options)], connection=connection)[0]

    def enqueue_many(self, specs: Iterable[JobSpec], *, connection: object | None = None) -> list[Enqueued]:
        """See `workers.Queue.enqueue_many`; `connection` as in `enqueue`."""
        if connection is not None:
            return self._queue.enqueue_on(connection, specs)
        chosen = list(specs)

        async def enqueue() -> list[Enqueued]:
            self._closed_at_end()
            if len(chosen) == 1:  # concurrent calls share a round trip
                return [await self._queue.enqueue_spec(chosen[0])]
            return await self._queue.enqueue_many(chosen)

        return background.run(enqueue)

    def enqueue_and_wait(
        self,
        payload: object,
        *,
        timeout: timedelta = timedelta(seconds=30),
        name: str = DEFAULT_NAME,
        **options: Unpack[JobOptions],
    ) -> object:
        """See `workers.Queue.enqueue_and_wait`."""

        async def ask() -> object:
            self._closed_at_end()
            return await self._queue.enqueue_and_wait(payload, timeout=timeout, name=name, **options)

        return background.run(ask)

    def get_status(self, job_id: str) -> JobStatus | None:
        """See `workers.Queue.get_status`."""

        async def ask() -> JobStatus | None:
            self._closed_at_end()
            return await self._queue.get_status(job_id)

        return background.run(ask)

    def get_result(self, job_id: str) -> object:
        """See `workers.Queue.get_result`."""

        async def ask() -> object:
            self._closed_at_end()
            return await self._queue.get_result(job_id)

        return background.run(ask)

    def counts(self) -> dict[JobState, int]:
        """See `workers.Queue.counts`."""

        async def ask() -> dict[JobState, int]:
            self._closed_at_end()
            return await self._queue.counts()

        return background.run(ask)

    def cancel(self, job_id: str) -> CancelResult:
        """See `workers.Queue.cancel`."""

        async def ask() -> CancelResult:
            self._closed_at_end()
            return await self._queue.cancel(job_id)

        return background.run(ask)

    def close(self) -> None:
        """The storage is disconnected; a second call does nothing, and a later use connects it again."""
        queue = self._queue

        async def stop() -> None:
            background.at_end(id(queue), None)
            await queue.stop()

        background.run(stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _closed_at_end(self) -> None:
        background.at_end(id(self._queue), self._queue.stop)


def _let_go(queue: AsyncQueue) -> None:
    async def stop() -> None:
        background.at_end(id(queue), None)
        await queue.stop()

    background.soon(stop)
