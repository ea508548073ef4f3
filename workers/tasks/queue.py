"""The queue as tasks see it, of this package or any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol, cast

from workers.checks import MAX_DELAY, check_text
from workers.deduplication import Deduplication, DeduplicationMode
from workers.jobs import AfterFailure, JobRef
from workers.options import QueueOptions
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.serde import Encoded, Serde
from workers.specs import JobSpec
from workers.storage.base import Storage

CONCURRENCY: Final = 10
"""How many tasks run at a time where there was no queue that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMessage:
    """One run of a task to come, as a queue carries it from `TaskQueue.enqueue` to `Tasks.process`.

    `uncounted` is how many runs in a row asked not to be counted; None for `max_attempts` leaves it to the queue.
    """

    id: str
    task: str
    payload: bytes = field(repr=False)
    attempt: int = 1
    uncounted: int = 0
    max_attempts: int | None = None
    ordering_key: str | None = None
    limit_key: str | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueOptions:
    """Options of an enqueue; one for a whole batch.

    The deduplication fields are set only for queues that declare `native_deduplication`. The key includes the name of
    its task already. `deduplication_ttl` counts from now; it is None for `simple`. `after` has the ids of the jobs that
    each of the batch follows. It is set only for queues that declare `native_dependencies`, and `priority` only for
    those that declare `native_priorities`.

    Raises:
        ValueError: a delay outside 0 ... 100 years, a key that is not 1 to 512 bytes of UTF-8.
    """

    delay: timedelta = timedelta(0)
    priority: int = 0
    ordering_key: str | None = None
    deduplication_key: str | None = None
    deduplication_mode: DeduplicationMode = DeduplicationMode.THROTTLE
    deduplication_ttl: timedelta | None = None
    after: tuple[str | JobRef, ...] = ()
    after_failure: AfterFailure = AfterFailure.FAIL

    def __post_init__(self) -> None:
        if not isinstance(self.delay, timedelta) or not timedelta(0) <= self.delay <= MAX_DELAY:
            raise ValueError(f"delay is a timedelta from 0 to 100 years, not {self.delay!r}")
        if self.ordering_key is not None:
            check_text("ordering key", self.ordering_key)
        if self.deduplication_key is not None:
            check_text("deduplication key, its task's name and escapes included,", self.deduplication_key)


class TaskQueue(Protocol):
    """A queue that tasks can be enqueued to; it declares what it does by itself."""

    @property
    def native_retrial(self) -> bool:
        """Whether the queue itself repeats what failed; otherwise `Tasks.process` enqueues it again."""

    @property
    def native_deduplication(self) -> bool:
        """Whether the queue keeps `deduplication_key`.

        It does so atomically with the enqueue, for the whole batch and in every mode.
        """

    @property
    def serde(self) -> Serde:
        """The encoding of payloads, as the queue's consumers expect them."""

    async def enqueue(self, messages: Sequence[TaskMessage], options: EnqueueOptions) -> str | None:
        """Store all messages and return None, or store none and return the id of the job that has the key."""


class QueueTasks:
    """Tasks on a `Queue`: each is a job named after its task, and the worker repeats what failed."""

    native_retrial = True
    native_priorities = True

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    @property
    def native_deduplication(self) -> bool:
        return self._queue.storage.capabilities.deduplication

    @property
    def native_dependencies(self) -> bool:
        return self._queue.storage.capabilities.dependencies

    @property
    def serde(self) -> Serde:
        return self._queue.payload_serde

    async def enqueue(
        self,
        messages: Sequence[TaskMessage],
        options: EnqueueOptions,
        connection: object | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> str | None:
        deduplication = _deduplication(options)
        specs = [
            JobSpec(
                id=message.id,
                name=message.task,
                payload=Encoded(message.payload),
                delay=options.delay,
                priority=options.priority,
                max_attempts=message.max_attempts,
                ordering_key=options.ordering_key,
                limit_key=message.limit_key,
                deduplication=deduplication,
                after=options.after,
                after_failure=options.after_failure,
                meta=meta,
            )
            for message in messages
        ]
        found = await self._queue.enqueue_many(specs, connection=connection)
        # The message's own id means that the storage repeated a call whose answer was lost: the jobs are stored.
        taken = found[0].id if found else None
        return None if taken is None or taken == messages[0].id else taken


def _deduplication(options: EnqueueOptions) -> Deduplication | None:
    """Return the key as a queue of this package takes it: its time counts from when the job is due."""
    if options.deduplication_key is None:
        return None
    ttl = options.deduplication_ttl
    return Deduplication(
        key=options.deduplication_key,
        mode=options.deduplication_mode,
        ttl=None if ttl is None else ttl - options.delay,
    )


def queues_of(given: Queue | Storage | TaskQueue | str, retry: RetryPolicy | None) -> tuple[Queue | None, TaskQueue]:
    """Return our queue, if it is one, and how tasks see it.

    Raises:
        TypeError: it is no queue.
        ValueError: a `retry` that the queue would not follow.
    """
    if hasattr(given, "native_retrial"):
        return None, cast(TaskQueue, given)
    if isinstance(given, str) or hasattr(given, "capabilities"):
        options = QueueOptions(retry=retry, makes_tables=True)
        given = Queue(cast("Storage | str", given), concurrency=CONCURRENCY, options=options)
    elif retry is not None and isinstance(given, Queue):
        raise ValueError("a Queue has its own retry: Queue(..., options=QueueOptions(retry=...))")
    if not isinstance(given, Queue):
        raise TypeError(f"tasks go to a URL, a storage or a queue, not to {given!r}")
    return given, QueueTasks(given)
