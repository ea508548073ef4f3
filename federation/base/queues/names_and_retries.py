"""The queues: their names, how often their jobs are tried, and how long ended jobs are kept."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from federation.base.queues.queue import JobQueue
from federation.base.queues.storages import bullmq_url
from federation.base.settings.settings import Settings
from workers.checks import MAX_DELAY
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.storage.base import Storage

DELIVERY_QUEUE_NAME: Final = "federation-delivery"
HEALTH_CHECK_QUEUE_NAME: Final = "federation-health-check"
DISCOVERY_QUEUE_NAME: Final = "federation-discovery"
TASKS_QUEUE_NAME: Final = "federation-tasks"
QUEUE_NAMES: Final = (DELIVERY_QUEUE_NAME, HEALTH_CHECK_QUEUE_NAME, DISCOVERY_QUEUE_NAME, TASKS_QUEUE_NAME)

KEEP_COMPLETED: Final = timedelta(hours=24)
KEEP_FAILED: Final = timedelta(days=7)
KEEP_DISCOVERED: Final = timedelta(seconds=5)
KEEP_TASKS: Final = timedelta(hours=24)


def delivery_queue(settings: Settings, storage: Storage, *, make: Callable[..., JobQueue] = JobQueue) -> JobQueue:
    """Make the delivery queue: 5 attempts, 5, 10, 20, 40 s apart without jitter.

    Completed jobs are kept 24 h, failed ones 7 days.
    """
    return make(
        storage,
        max_attempts=settings.federation_delivery_attempts,
        backoff=delivery_backoff(settings),
        keep_completed=KEEP_COMPLETED,
        keep_failed=KEEP_FAILED,
        redis_url=bullmq_url(settings),
        prefix=settings.federation_queue_prefix,
    )


def health_check_queue(settings: Settings, storage: Storage) -> JobQueue:
    """Make the health-check queue, without defaults: one attempt per job, kept an hour unless it says otherwise."""
    return JobQueue(storage, redis_url=bullmq_url(settings), prefix=settings.federation_queue_prefix)


def discovery_queue(storage: Storage) -> Queue:
    """Make the discovery queue: one attempt per job, as the asking delivery is itself tried again; jobs kept 5 s."""
    return Queue(storage, max_attempts=1, result_ttl=KEEP_DISCOVERED, keep_failed=KEEP_DISCOVERED)


def tasks_queue(storage: Storage) -> Queue:
    """Make the queue of the application's own tasks: 3 attempts unless a task says otherwise.

    Completed jobs are kept 24 h, failed ones 7 days.
    """
    return Queue(storage, result_ttl=KEEP_TASKS, keep_failed=KEEP_FAILED)


def delivery_backoff(settings: Settings) -> RetryPolicy:
    """Return the pauses between attempts at a delivery: doubling, without jitter."""
    return RetryPolicy(initial=settings.federation_delivery_backoff, maximum=MAX_DELAY, jitter=0)


def longest_delivery_pause(settings: Settings) -> timedelta:
    """Return how long the last pause between two attempts at a delivery is."""
    return delivery_backoff(settings).delay(settings.federation_delivery_attempts)
