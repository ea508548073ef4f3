"""Events handed to subscribers of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from workers.jobs import JobEvent, JobEventKind

_CANCEL_REQUESTED: Final = JobEventKind.CANCEL_REQUESTED  # by its enum it takes longer to find than all the rest
BUFFER: Final = 1_000
"""Events kept for a subscriber that does not read; then the oldest go first."""


class BufferedSubscription:
    """Events in the order they happened; see `Subscription`."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[JobEvent] = asyncio.Queue(BUFFER)

    async def get(self) -> JobEvent:
        return await self._events.get()

    def put(self, event: JobEvent) -> None:
        """`event` is the newest in the buffer; the oldest made room for it if it was full."""
        if self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(event)


class Broadcast:
    """Who listens to which job, to all of them, and to cancel requests. An event nobody listens to costs a look-up."""

    def __init__(self) -> None:
        self._everything: set[BufferedSubscription] = set()
        self._of_job: dict[str, set[BufferedSubscription]] = {}
        self._cancel_requests: set[BufferedSubscription] = set()

    def publish(self, kind: JobEventKind, job_id: str) -> None:
        """Every subscriber of the job, and of everything, has the event in its buffer."""
        if kind is _CANCEL_REQUESTED:
            self.request_cancel(job_id)
        if not self._everything and job_id not in self._of_job:
            return
        event = JobEvent(kind=kind, job_id=job_id)
        for subscription in self._everything | self._of_job.get(job_id, set()):
            subscription.put(event)

    def request_cancel(self, job_id: str) -> None:
        """Every subscriber of cancel requests alone has this one in its buffer."""
        for subscription in self._cancel_requests:
            subscription.put(JobEvent(kind=_CANCEL_REQUESTED, job_id=job_id))

    def awaited(self) -> list[str]:
        """The jobs with subscribers of their own; from any thread."""
        return list(self._of_job)

    def scope(self, job_id: str | None) -> AbstractContextManager[BufferedSubscription]:
        """A subscription to one job, to every job with None, until the context ends."""
        return self.everything() if job_id is None else self.of_job(job_id)

    @contextmanager
    def everything(self) -> Iterator[BufferedSubscription]:
        """A subscription to every job, until the context ends."""
        with _member_of(self._everything) as subscription:
            yield subscription

    @contextmanager
    def cancel_requests(self) -> Iterator[BufferedSubscription]:
        """A subscription to requests to cancel a running job, until the context ends."""
        with _member_of(self._cancel_requests) as subscription:
            yield subscription

    @contextmanager
    def of_job(self, job_id: str) -> Iterator[BufferedSubscription]:
        """A subscription to one job, until the context ends."""
        listeners = self._of_job.setdefault(job_id, set())
        try:
            with _member_of(listeners) as subscription:
                yield subscription
        finally:
            if not listeners:
                self._of_job.pop(job_id, None)


@contextmanager
def _member_of(listeners: set[BufferedSubscription]) -> Iterator[BufferedSubscription]:
    subscription = BufferedSubscription()
    listeners.add(subscription)
    try:
        yield subscription
    finally:
        listeners.discard(subscription)
