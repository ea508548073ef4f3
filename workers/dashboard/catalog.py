"""The queues of a dashboard, and what is read of each by itself: one that does not answer is only that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, ClassVar, Final, TypeAlias, TypeVar

from workers.dashboard.api import ANSWERED, given
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal
from workers.details import JobDetails
from workers.errors import StorageError, WorkersError
from workers.jobs import JobState, JobStatus, Page, WorkerInfo
from workers.limits import Limit
from workers.queue import Queue

T = TypeVar("T")

PATIENCE: Final = timedelta(seconds=5)
PER_PAGE: Final = 50
AT_ONCE: Final = 1_000
"""How many jobs an action on a whole state takes; repeating it takes the next."""

WAITING_STATES: Final = (JobState.QUEUED, JobState.SCHEDULED, JobState.WAITING, JobState.FAILING)


class NoAnswer(Exception):
    """A queue did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLine:
    """One queue as it stands; of one that does not answer only the problem is known."""

    __pydantic_config__: ClassVar = ANSWERED

    name: str
    paused: bool = False
    counts: Mapping[JobState, int] = field(default_factory=lambda: dict.fromkeys(JobState, 0))
    workers: Sequence[WorkerInfo] = ()
    problem: str | None = None

    @property
    def alive(self) -> Sequence[WorkerInfo]:
        """The workers without those that are not heard of any more."""
        return [worker for worker in self.workers if not worker.is_silent]

    @property
    def running(self) -> int:
        return self.counts[JobState.PROCESSING]

    @property
    def failed(self) -> int:
        return self.counts[JobState.FAILED]

    @property
    def waiting(self) -> int:
        """How many are still to run, now or later."""
        return sum(self.counts[state] for state in WAITING_STATES)


class QueueCatalog:
    """The queues by name, in the order in which they were given."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._queues: dict[str, Queue] = {}
        for queue in queues:
            name, number = queue.storage.queue, 1
            while name in self._queues:  # of another storage
                number += 1
                name = f"{queue.storage.queue} ({number})"
            self._queues[name] = queue

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def named(self, name: str) -> Queue:
        """Return the queue of that name.

        Raises:
            Refusal: there is none.
        """
        if name not in self._queues:
            raise Refusal(404, "There is no such queue.")
        return self._queues[name]

    async def lines(self) -> list[QueueLine]:
        """Return how all queues stand. Each is asked at the same time, and those that do not answer say so."""
        return list(await asyncio.gather(*(self.line(name) for name in self._queues)))

    async def line(self, name: str) -> QueueLine:
        """Return how a queue stands."""
        queue = self.named(name)
        try:
            paused, counts, workers = await answer(self._read(queue))
        except (WorkersError, NoAnswer) as error:
            return QueueLine(name=name, problem=told(error))
        return QueueLine(name=name, paused=paused, counts=counts, workers=workers)

    async def _read(self, queue: Queue) -> tuple[bool, Mapping[JobState, int], Sequence[WorkerInfo]]:
        return await queue.manage.is_paused(), await queue.counts(), await queue.manage.workers()

    async def jobs(self, name: str, state: JobState, after: str | None, *, limit: int | None = None) -> Page:
        """Return one page of the jobs in a state.

        Raises:
            Refusal: the list does not go on at `after`.
        """
        try:
            return await answer(self.named(name).manage.list(state, cursor=after, limit=limit or PER_PAGE))
        except StorageError as error:
            if after is None:
                raise
            raise Refusal(400, short(str(error), 400)) from None

    async def limits(self, name: str) -> Mapping[str, Limit]:
        """Return the limits that are stored with a queue, by name; none where the storage keeps none."""
        return await answer(self.named(name).manage.limits())

    async def job(self, name: str, job_id: str) -> JobDetails | None:
        """Return a job as it stands."""
        return await answer(self.named(name).get_job(job_id))

    async def held_back(self, name: str, job: JobStatus) -> str | None:
        """Say which limit keeps a queued job back, and until when; None for any other job."""
        if job.state is not JobState.QUEUED:
            return None
        back = await answer(self.named(name).held_back(job.id))
        return None if back is None else str(back)

    async def close(self) -> None:
        """Close the connections."""
        for queue in self._queues.values():
            await queue.stop()


Queues: TypeAlias = Annotated[QueueCatalog, given(QueueCatalog)]
"""What FastAPI passes to a call."""


async def answer(asked: Awaitable[T]) -> T:
    """Return what a storage answers.

    Raises:
        NoAnswer: it does not answer in time.
    """
    try:
        async with asyncio.timeout(PATIENCE.total_seconds()):
            return await asked
    except TimeoutError:
        raise NoAnswer(f"The queue does not answer within {PATIENCE.total_seconds():.0f} s.") from None


def told(error: Exception) -> str | None:
    """Say what is wrong with a queue; None for what is no fault of a storage."""
    if isinstance(error, NoAnswer | WorkersError):
        text = str(error) or type(error).__name__
        return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")
    return None
