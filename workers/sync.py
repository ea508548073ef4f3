"""A queue for plain code: threads, scripts and web frameworks without an event loop.

It has the calls of `workers.Queue`, without `await`. Jobs that join a caller's transaction go over the caller's
connection, in the calling thread. For everything else the calling thread waits for one background loop per process.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack
from weakref import finalize

from workers.background import background
from workers.details import JobDetails
from workers.flows import EnqueuedFlow, FlowJob
from workers.jobs import CancelResult, JobState, JobStatus
from workers.limits import Limit
from workers.options import QueueOptions
from workers.queue import Queue as AsyncQueue
from workers.specs import DEFAULT_NAME, Enqueued, JobOptions, JobSpec
from workers.storage.abilities import Joinable
from workers.storage.base import Storage

__all__ = ["Queue", "SyncQueue"]

T = TypeVar("T")


class SyncQueue:
    """Enqueues jobs to `storage` and asks about them. Safe to use from any thread, and after a fork.

    The storage belongs to this queue alone: an asynchronous `Queue` needs one of its own. The first call that needs a
    connection makes one. `close`, the end of a `with` block, or the end of the last reference to this queue
    disconnects.
    """

    def __init__(
        self,
        storage: Storage | str,
        *,
        max_attempts: int = 3,
        result_ttl: timedelta | int = timedelta(hours=1),
        options: QueueOptions = QueueOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        self._queue = AsyncQueue(storage, max_attempts=max_attempts, result_ttl=result_ttl, options=options)
        finalize(self, _let_go, self._queue).atexit = False  # the background loop closes it at the interpreter's end

    @classmethod
    def over(cls, queue: AsyncQueue) -> Self:
        """Return the calls of this queue, which nothing else may use meanwhile, and whose owner closes it."""
        made = cls.__new__(cls)
        made._queue = queue
        return made

    @property
    def storage(self) -> Storage:
        return self._queue.storage

    def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """See `workers.Queue.declare_limits`."""
        self._queue.declare_limits(limits)

    def enqueue(
        self,
        payload: object,
        *,
        name: str = DEFAULT_NAME,
        connection: object | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """See `workers.Queue.enqueue`.

        `connection` is the owner of a transaction: a synchronous SQLAlchemy `Session` or `Connection`, Django's
        `connection` in a `transaction.atomic` block, or one of `sqlite3` or psycopg 3.

        Raises:
            Unsupported: the storage is in no database.
            TypeError, ValueError: the connection is something else, or in autocommit.
            StorageError: it is one of another database than the jobs'.
        """
        return self.enqueue_many([JobSpec(payload=payload, name=name, **options)], connection=connection)[0]

    def enqueue_many(self, specs: Iterable[JobSpec], *, connection: object | None = None) -> list[Enqueued]:
        """See `workers.Queue.enqueue_many`; `connection` as in `enqueue`."""
        if connection is not None:
            return self._enqueue_on(connection, specs)
        chosen = list(specs)
        if len(chosen) == 1:  # concurrent calls share a round trip
            return [self._run(lambda queue: queue.enqueue_spec(chosen[0]))]
        return self._run(lambda queue: queue.enqueue_many(chosen))

    def _enqueue_on(self, connection: object, specs: Iterable[JobSpec]) -> list[Enqueued]:
        if not isinstance(self.storage, Joinable):
            return self._queue.enqueue_on(connection, specs)  # says why not
        from workers.borrowed import joined

        with joined(connection) as caller:
            return self._queue.enqueue_on(caller, specs)

    def enqueue_flow(self, tree: FlowJob) -> EnqueuedFlow:
        """See `workers.Queue.enqueue_flow`."""
        return self._run(lambda queue: queue.enqueue_flow(tree))

    def enqueue_and_wait(
        self,
        payload: object,
        *,
        timeout: timedelta | float = timedelta(seconds=30),
        name: str = DEFAULT_NAME,
        **options: Unpack[JobOptions],
    ) -> object:
        """See `workers.Queue.enqueue_and_wait`."""
        return self._run(lambda queue: queue.enqueue_and_wait(payload, timeout=timeout, name=name, **options))

    def wait_for_job_chain_completion(
        self, chain_id: str, timeout: timedelta | float = timedelta(seconds=30)
    ) -> object:
        """See `workers.Queue.wait_for_job_chain_completion`."""
        return self._run(lambda queue: queue.wait_for_job_chain_completion(chain_id, timeout))

    def get_status(self, job_id: str) -> JobStatus | None:
        """See `workers.Queue.get_status`."""
        return self._run(lambda queue: queue.get_status(job_id))

    def get_job(self, job_id: str) -> JobDetails | None:
        """See `workers.Queue.get_job`."""
        return self._run(lambda queue: queue.get_job(job_id))

    def get_result(self, job_id: str) -> object:
        """See `workers.Queue.get_result`."""
        return self._run(lambda queue: queue.get_result(job_id))

    def counts(self) -> dict[JobState, int]:
        """See `workers.Queue.counts`."""
        return self._run(lambda queue: queue.counts())

    def cancel(self, job_id: str) -> CancelResult:
        """See `workers.Queue.cancel`."""
        return self._run(lambda queue: queue.cancel(job_id))

    def close(self) -> None:
        """Disconnect the storage. A second call does nothing, and a later use connects again."""
        background.run(partial(_stop, self._queue))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Callable[[AsyncQueue], Coroutine[object, object, T]]) -> T:
        queue = self._queue

        async def run() -> T:
            background.at_end(id(queue), queue.stop)
            return await work(queue)

        return background.run(run)


Queue = SyncQueue
"""Its name where there is no other: `from workers.sync import Queue`."""


async def _stop(queue: AsyncQueue) -> None:
    background.at_end(id(queue), None)
    await queue.stop()


def _let_go(queue: AsyncQueue) -> None:
    background.soon(partial(_stop, queue))
