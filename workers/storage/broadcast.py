"""Events handed to subscribers of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from workers.jobs import JobEvent, JobEventKind

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
    """Who listens to which job, and to all of them. An event nobody listens to costs one look-up."""

    def __init__(self) -> None:
        self._everything: set[BufferedSubscription] = set()
        self._of_job: dict[str, set[BufferedSubscription]] = {}

    def publish(self, kind: JobEventKind, job_id: str) -> None:
        """Every subscriber of the job, and of everything, has the event in its buffer."""
        if not self._everything and job_id not in self._of_job:
            return
        event = JobEvent(kind=kind, job_id=job_id)
        for subscription in self._everything | self._of_job.get(job_id, set()):
            subscription.put(event)

    def awaited(self) -> list[str]:
        """The jobs with subscribers of their own; from any thread."""
        return list(self._of_job)

    @contextmanager
    def everything(self) -> Iterator[BufferedSubscription]:
        """A subscription to every job, until the context ends."""
        subscription = BufferedSubscription()
        self._everything.add(subscription)
        try:
            yield subscription
        finally:
            self._everything.discard(subscription)

    @contextmanager
    def of_job(self, job_id: str) -> Iterator[BufferedSubscription]:
        """A subscription to one job, until the context ends."""
        subscription = BufferedSubscription()
        self._of_job.setdefault(job_id, set()).add(subscription)
        try:
            yield subscription
        finally:
            listeners = self._of_job[job_id]
            listeners.discard(subscription)
            if not listeners:
                del self._of_job[job_id]
