"""What programs ask of queues: how they and their jobs stand, and what is done to these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from workers.dashboard.calls import LISTED, After, AnyCall, Call, Caller, Limit, Listing, NothingAsked
from workers.dashboard.catalog import AT_ONCE, QueueCatalog, QueueLine, answer
from workers.dashboard.job_actions import ACTIONS, act_on
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal
from workers.jobs import ErrorInfo, JobState, JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedQueue:
    """A queue."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsAsked:
    """The jobs of a queue in one state."""

    queue: str
    state: JobState
    limit: Limit = LISTED
    after: After = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJob:
    """A job of a queue."""

    queue: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsOrder:
    """What is to be done to jobs: to those with these ids, or with `all` to the first 1 000 in a state."""

    queue: str
    action: Literal["retry", "promote", "remove"]
    ids: Sequence[str] = ()
    all: bool = False
    state: JobState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """A job as it stands; `attempt` counts its runs so far, `progress` is what its handler reported last.

    `waits` says which limit keeps it back, and until when; lists do not look for that.
    """

    id: str
    name: str
    state: JobState
    attempt: int
    max_attempts: int
    priority: int
    created_at: datetime
    next_run_at: datetime | None
    finished_at: datetime | None
    worker_id: str | None
    last_error: ErrorInfo | None
    progress: object
    waits: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsDone:
    """To how many of the jobs it was done. The others had changed meanwhile, or `problem` says what was wrong."""

    asked: int
    done: int
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSwitched:
    """Whether the queue is paused now."""

    queue: str
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitLine:
    """A limit that is stored with a queue; `*` is that of all its jobs together.

    Of each key up to `rate` jobs start, after a pause up to `burst` at once, and `concurrency` run at the same time.
    """

    name: str
    rate: str | None
    burst: int | None
    concurrency: int | None
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLine:
    """A worker of a queue, and how many jobs it holds. A `silent` one was not heard of for 3 min: it may have died."""

    queue: str
    id: str
    seen_at: datetime
    claims: int
    silent: bool


def queue_calls(queues: QueueCatalog) -> Sequence[AnyCall]:
    """Return the calls about these queues."""
    calls = QueueCalls(queues)
    return (
        Call(
            method="GET",
            path="/queues",
            summary="List all queues.",
            asks=NothingAsked,
            answers=QueueLine,
            code=calls.all,
            lists=True,
        ),
        Call(
            method="GET",
            path="/queue",
            summary="Show how a queue stands.",
            asks=NamedQueue,
            answers=QueueLine,
            code=calls.one,
        ),
        Call(
            method="GET",
            path="/queue/limits",
            summary="List the limits that are stored with a queue.",
            asks=NamedQueue,
            answers=LimitLine,
            code=calls.limits,
            lists=True,
        ),
        Call(
            method="GET",
            path="/jobs",
            summary="List the jobs of a queue in one state.",
            asks=JobsAsked,
            answers=JobAnswer,
            code=calls.jobs,
            lists=True,
        ),
        Call(method="GET", path="/job", summary="Show one job.", asks=NamedJob, answers=JobAnswer, code=calls.job),
        Call(
            method="GET",
            path="/workers",
            summary="List the workers of each queue.",
            asks=NothingAsked,
            answers=WorkerLine,
            code=calls.workers,
            lists=True,
        ),
        Call(
            method="POST",
            path="/queue/pause",
            summary="Let no worker claim a job of the queue.",
            asks=NamedQueue,
            answers=QueueSwitched,
            code=calls.pause,
        ),
        Call(
            method="POST",
            path="/queue/resume",
            summary="Let workers claim jobs of the queue again.",
            asks=NamedQueue,
            answers=QueueSwitched,
            code=calls.resume,
        ),
        Call(
            method="POST",
            path="/jobs",
            summary="Retry, promote or remove jobs.",
            asks=JobsOrder,
            answers=JobsDone,
            code=calls.act,
        ),
    )


class QueueCalls:
    """What the calls do."""

    def __init__(self, queues: QueueCatalog) -> None:
        self._queues = queues

    async def all(self, _caller: Caller, _asked: NothingAsked) -> Listing:
        """Return every queue."""
        return Listing(items=await self._queues.lines())

    async def one(self, _caller: Caller, asked: NamedQueue) -> QueueLine:
        """Return one queue."""
        return await self._queues.line(asked.name)

    async def limits(self, _caller: Caller, asked: NamedQueue) -> Listing:
        """Return the limits of one queue."""
        found = await self._queues.limits(asked.name)
        return Listing(
            items=[
                LimitLine(
                    name=name,
                    rate=each.rate,
                    burst=each.burst,
                    concurrency=each.concurrency,
                    version=each.version,
                )
                for name, each in sorted(found.items())
            ]
        )

    async def jobs(self, _caller: Caller, asked: JobsAsked) -> Listing:
        """Return jobs of one state."""
        page = await self._queues.jobs(asked.queue, asked.state, asked.after, limit=asked.limit)
        return Listing(
            items=[_told(job) for job in page.jobs], after=None if page.cursor is None else {"after": page.cursor}
        )

    async def job(self, _caller: Caller, asked: NamedJob) -> JobAnswer:
        """Return one job."""
        status = await self._queues.job(asked.queue, asked.id)
        if status is None:
            raise Refusal(404, f"Queue {short(asked.queue)} knows no job of that id: there was none, or it is over.")
        return _told(status, waits=await self._queues.held_back(asked.queue, status))

    async def workers(self, _caller: Caller, _asked: NothingAsked) -> Listing:
        """Return the workers of every queue."""
        lines = await self._queues.lines()
        seen = [(line.name, worker) for line in lines for worker in line.workers]
        return Listing(
            items=[
                WorkerLine(queue=name, id=each.id, seen_at=each.seen_at, claims=each.claims, silent=each.is_silent)
                for name, each in seen
            ]
        )

    async def pause(self, caller: Caller, asked: NamedQueue) -> QueueSwitched:
        """Pause a queue."""
        await answer(self._queues.named(asked.name).manage.pause())
        await caller.record("queues pause", asked.name, 1)
        return QueueSwitched(queue=asked.name, paused=True)

    async def resume(self, caller: Caller, asked: NamedQueue) -> QueueSwitched:
        """Let a queue go on."""
        await answer(self._queues.named(asked.name).manage.resume())
        await caller.record("queues resume", asked.name, 1)
        return QueueSwitched(queue=asked.name, paused=False)

    async def act(self, caller: Caller, asked: JobsOrder) -> JobsDone:
        """Do it to those jobs."""
        queue = self._queues.named(asked.queue)
        ids = [*dict.fromkeys(asked.ids)]
        if asked.all == bool(ids):
            raise Refusal(400, "Give either `ids`, or `all` and a `state`.")
        if asked.all:
            states = ACTIONS[asked.action].states
            if asked.state is None or asked.state not in states:
                raise Refusal(400, f"With `all`, `state` is one of: {', '.join(states)}.")
            ids = [job.id for job in (await answer(queue.manage.list(asked.state, limit=AT_ONCE))).jobs]
        done, problem = await act_on(queue, asked.action, ids)
        await caller.record(f"jobs {asked.action}", f"{asked.queue}: {', '.join(ids)}", done, problem=problem)
        return JobsDone(asked=len(ids), done=done, problem=problem)


def _told(job: JobStatus, *, waits: str | None = None) -> JobAnswer:
    names = [name for name in JobAnswer.__dataclass_fields__ if name != "waits"]
    shown: Mapping[str, object] = {name: getattr(job, name) for name in names}
    return JobAnswer(**shown, waits=waits)  # type: ignore[arg-type] # fields of the same names and types
