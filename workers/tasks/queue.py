"""What tasks ask of a queue, ours or somebody else's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

from workers.checks import MAX_DELAY, check_text
from workers.deduplication import Deduplication, DeduplicationMode
from workers.queue import Queue
from workers.serde import Encoded, Serde
from workers.specs import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMessage:
    """One run of a task to come, as a queue carries it from `TaskQueue.enqueue` to `Tasks.process`.

    `uncounted` is how many runs in a row asked not to be counted; `max_attempts` of None leaves it to the queue.
    """

    id: str
    task: str
    payload: bytes = field(repr=False)
    attempt: int = 1
    uncounted: int = 0
    max_attempts: int | None = None
    ordering_key: str | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueOptions:
    """How to enqueue; one for a whole batch.

    The deduplication fields are set for queues that declare `native_deduplication` alone. The key names its task
    already, and `deduplication_ttl`, None for `simple`, counts from now.

    Raises:
        ValueError: a delay outside 0 ... 100 years, a key that is not 1 to 512 bytes of UTF-8.
    """

    delay: timedelta = timedelta(0)
    ordering_key: str | None = None
    deduplication_key: str | None = None
    deduplication_mode: DeduplicationMode = DeduplicationMode.THROTTLE
    deduplication_ttl: timedelta | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.delay, timedelta) or not timedelta(0) <= self.delay <= MAX_DELAY:
            raise ValueError(f"delay is a timedelta from 0 to 100 years, not {self.delay!r}")
        if self.ordering_key is not None:
            check_text("ordering key", self.ordering_key)
        if self.deduplication_key is not None:
            check_text("deduplication key, its task's name and escapes included,", self.deduplication_key)


class TaskQueue(Protocol):
    """A queue that tasks can be enqueued to, with what it declares to do by itself."""

    @property
    def native_retrial(self) -> bool:
        """Whether it runs what failed again; else `Tasks.process` enqueues it anew."""

    @property
    def native_deduplication(self) -> bool:
        """Whether it keeps `deduplication_key`, atomically with the enqueue and for the whole batch, in every mode."""

    @property
    def serde(self) -> Serde:
        """How payloads become the bytes that its consumers get."""

    async def enqueue(self, messages: Sequence[TaskMessage], options: EnqueueOptions) -> str | None:
        """All messages are stored, and None is answered.

        Or none is, and the id of the job is answered that `deduplication_key` already stands for.
        """


class QueueTasks:
    """Tasks on a `Queue`: jobs named like their task, whose worker repeats what failed."""

    native_retrial = True

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    @property
    def native_deduplication(self) -> bool:
        return self._queue.storage.limits.deduplication

    @property
    def serde(self) -> Serde:
        return self._queue.payload_serde

    async def enqueue(self, messages: Sequence[TaskMessage], options: EnqueueOptions) -> str | None:
        deduplication = _deduplication(options)
        found = await self._queue.enqueue_many(
            JobSpec(
                id=message.id,
                name=message.task,
                payload=Encoded(message.payload),
                delay=options.delay,
                max_attempts=message.max_attempts,
                ordering_key=options.ordering_key,
                deduplication=deduplication,
            )
            for message in messages
        )
        # With the id of a message of its own it was answered to a repeated call.
        taken = found[0].id if found else None
        return None if taken is None or taken == messages[0].id else taken


def _deduplication(options: EnqueueOptions) -> Deduplication | None:
    """The key as a queue of ours takes it, whose time counts from when the job is due."""
    if options.deduplication_key is None:
        return None
    ttl = options.deduplication_ttl
    return Deduplication(
        key=options.deduplication_key,
        mode=options.deduplication_mode,
        ttl=None if ttl is None else ttl - options.delay,
    )
