"""Enqueues of tasks: what is refused, what is encoded, which key is taken, and what goes to the queue."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from workers.checks import as_duration, new_id
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import Unsupported
from workers.jobs import EnqueueStatus
from workers.serde import Encoded
from workers.slices import in_slices, sliced
from workers.specs import JobSpec
from workers.tasks.declared import Task
from workers.tasks.kv_deduplication import KvDeduplication
from workers.tasks.options import CallOptions
from workers.tasks.queue import QueueTasks, TaskMessage, TaskQueue
from workers.tasks.unique import TakenKey

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedTasks:
    """The outcome of a batch: the ids of its jobs; or `duplicate`, with the id of the first job that has the key."""

    status: EnqueueStatus
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueuer:
    """Puts runs of tasks into one queue. For one that keeps no deduplication keys `marks` keeps them, if there is any.

    A key is taken for `ttl` unless something says how long. `is_closed`: no enqueue goes without the key that it has.
    """

    queue: TaskQueue
    marks: KvDeduplication | None
    ttl: timedelta
    is_closed: bool

    @property
    def _is_ours(self) -> bool:
        return isinstance(self.queue, QueueTasks)

    def refuse_unable(self, task: Task, chosen: CallOptions) -> None:
        """Accept an enqueue that the queue and the store can do.

        Raises:
            Unsupported, TypeError: see `Tasks.enqueue_task`.
        """
        queue, name = self.queue, task.name
        if chosen.after and not getattr(queue, "native_dependencies", False):  # a foreign queue need not know of it
            raise Unsupported(f"task {name!r}: its queue lets no job follow others; leave `after` out")
        if chosen.priority and not getattr(queue, "native_priorities", False):
            raise Unsupported(f"task {name!r}: its queue has no priorities; leave `priority` out")
        if chosen.meta and not self._is_ours:
            raise Unsupported(f"task {name!r}: only a queue of this package keeps metadata; leave `meta` out")
        if chosen.connection is not None and not self._is_ours:
            raise Unsupported(f"task {name!r}: only a queue of this package joins transactions; leave `connection` out")
        mode = chosen.mode_of(task)
        if mode is None or queue.native_deduplication:
            return
        if chosen.connection is not None:
            raise Unsupported(f"task {name!r}: a mark in a store is no part of a transaction; leave the key out")
        if mode is not DeduplicationMode.THROTTLE:
            raise Unsupported(f"task {name!r}: deduplication by {mode.value} needs a queue that does it natively")
        if self.marks is None and self.is_closed:
            raise TypeError(
                f"task {name!r}: a deduplication key needs a queue that deduplicates natively, or a KV store "
                "with set_if_absent, compare_and_set and compare_and_delete"
            )

    async def enqueue(self, task: Task, items: Iterable[object], chosen: CallOptions) -> EnqueuedTasks:
        """Enqueue one run for each of the items; see `Tasks.enqueue_task_many`."""
        data = [each async for each in sliced(items)]
        messages = await in_slices(lambda each: self._message(task, each, chosen.ordering_key), data)
        if not messages:
            return EnqueuedTasks(status=EnqueueStatus.QUEUED, ids=())
        existing = await self._dispatch(messages, chosen, chosen.key(task, data, self.ttl))
        if existing is not None:
            return EnqueuedTasks(status=EnqueueStatus.DUPLICATE, ids=(existing,))
        return EnqueuedTasks(status=EnqueueStatus.QUEUED, ids=tuple(message.id for message in messages))

    def spec(self, task: Task, data: object, chosen: CallOptions) -> JobSpec:
        """Return one run of the task as a job; see `Tasks.spec`."""
        if chosen.connection is not None:
            raise TypeError(f"task {task.name!r}: give the connection to `enqueue_many`, with this job")
        if chosen.mode_of(task) is not None and not self.queue.native_deduplication:
            raise Unsupported(
                f"task {task.name!r}: a deduplication key in a job needs a queue that deduplicates natively; "
                "leave it out, or use enqueue_task without a transaction"
            )
        message = self._message(task, data, chosen.ordering_key)
        key = chosen.key(task, [data], self.ttl)
        return JobSpec(
            name=task.name,
            payload=Encoded(message.payload),
            limit_key=message.limit_key,
            delay=chosen.delay,
            priority=chosen.priority,
            max_attempts=task.max_attempts,
            ordering_key=chosen.ordering_key,
            deduplication=None if key is None else Deduplication(key=key.text, mode=key.mode, ttl=key.lasting),
            after=chosen.after,
            after_failure=chosen.after_failure,
            meta=chosen.meta,
        )

    def _message(self, task: Task, data: object, ordering_key: str | None) -> TaskMessage:
        if task.validate is not None:
            task.validate(data)
        return TaskMessage(
            id=new_id(),
            task=task.name,
            payload=self.queue.serde.dumps(data),
            max_attempts=task.max_attempts,
            ordering_key=ordering_key,
            limit_key=task.limit_key(data),
        )

    async def _dispatch(self, messages: list[TaskMessage], chosen: CallOptions, key: TakenKey | None) -> str | None:
        """Enqueue the messages and return None, or return the id of the job that has the key already."""
        enqueue = partial(self.queue.enqueue, messages)
        if isinstance(self.queue, QueueTasks):
            enqueue = partial(self.queue.enqueue, messages, connection=chosen.connection, meta=chosen.meta)
        if key is None:
            return await enqueue(chosen.for_queue())
        if self.queue.native_deduplication:
            return await enqueue(chosen.for_queue(key))
        if self.marks is None:
            _LOG.debug("task %r is enqueued without deduplication: no store writes conditionally", messages[0].task)
            return await enqueue(chosen.for_queue())
        marked = partial(enqueue, chosen.for_queue())
        return await self.marks.once(key.scope, messages[0].id, as_duration("delay", chosen.delay) + key.ttl, marked)
