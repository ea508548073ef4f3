"""What programs ask of queues: how they and their jobs stand, and what is done to these."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Final, Literal

from fastapi import Request
from pydantic import Field, PlainSerializer

from workers.dashboard.api import (
    LISTED,
    After,
    ApiAnswer,
    ApiOrder,
    Caller,
    Id,
    Ids,
    Limit,
    Listing,
    Text,
    calls,
    goes_on,
)
from workers.dashboard.catalog import AT_ONCE, QueueLine, Queues, answer
from workers.dashboard.job_actions import ACTIONS, act_on
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal
from workers.jobs import ErrorInfo, JobState, JobStatus

api: Final = calls()


class NamedQueue(ApiOrder):
    """A queue."""

    name: Text


class JobsOrder(ApiOrder):
    """What is to be done to jobs: to those with these ids, or with `all` to the first 1 000 in a state."""

    queue: Text
    action: Literal["retry", "promote", "remove"]
    ids: Ids = ()
    all: bool = False
    state: Annotated[JobState | None, Field(strict=False)] = None


def _in_unicode(progress: object) -> object:
    """Return what a handler reported with `?` for each half of a pair, which pydantic writes in no member's name."""
    return json.loads(json.dumps(progress, ensure_ascii=False).encode(errors="replace"))


class JobAnswer(ApiAnswer):
    """A job as it stands; `attempt` counts its runs so far, `progress` is what its handler reported last.

    `waits` says which limit keeps it back, and until when, `meta` has its metadata; lists do not look for these.
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
    progress: Annotated[object, PlainSerializer(_in_unicode)]
    waits: str | None = None
    meta: dict[str, str] | None = None


class JobsDone(ApiAnswer):
    """To how many of the jobs it was done. The others had changed meanwhile, or `problem` says what was wrong."""

    asked: int
    done: int
    problem: str | None


class QueueSwitched(ApiAnswer):
    """Whether the queue is paused now."""

    queue: str
    paused: bool


class LimitLine(ApiAnswer):
    """A limit that is stored with a queue; `*` is that of all its jobs together.

    Of each key up to `rate` jobs start, after a pause up to `burst` at once, and `concurrency` run at the same time.
    """

    name: str
    rate: str | None
    burst: int | None
    concurrency: int | None
    version: int


class WorkerLine(ApiAnswer):
    """A worker of a queue, and how many jobs it holds. A `silent` one was not heard of for 3 min: it may have died."""

    queue: str
    id: str
    seen_at: datetime
    claims: int
    silent: bool


@api.get("/queues")
async def list_queues(queues: Queues) -> Listing[QueueLine]:
    """List all queues."""
    return Listing(items=await queues.lines())


@api.get("/queue")
async def show_queue(queues: Queues, name: Text) -> QueueLine:
    """Show how a queue stands."""
    return await queues.line(name)


@api.get("/queue/limits")
async def list_limits(queues: Queues, name: Text) -> Listing[LimitLine]:
    """List the limits that are stored with a queue."""
    found = sorted((await queues.limits(name)).items())
    return Listing(
        items=[
            LimitLine(name=of, rate=each.rate, burst=each.burst, concurrency=each.concurrency, version=each.version)
            for of, each in found
        ]
    )


@api.get("/jobs")
async def list_jobs(
    request: Request, queues: Queues, queue: Text, state: JobState, limit: Limit = LISTED, after: After = None
) -> Listing[JobAnswer]:
    """List the jobs of a queue in one state."""
    page = await queues.jobs(queue, state, after, limit=limit)
    return Listing(items=[_told(job) for job in page.jobs], next=goes_on(request, after=page.cursor))


@api.get("/job")
async def show_job(queues: Queues, queue: Text, job_id: Id) -> JobAnswer:
    """Show one job."""
    found = await queues.job(queue, job_id)
    if found is None:
        raise Refusal(404, f"Queue {short(queue)} knows no job of that id: there was none, or it is over.")
    waits = await queues.held_back(queue, found.status)
    return _told(found.status, waits=waits, meta=dict(found.meta))


@api.get("/workers")
async def list_workers(queues: Queues) -> Listing[WorkerLine]:
    """List the workers of each queue."""
    return Listing(
        items=[
            WorkerLine(queue=line.name, id=each.id, seen_at=each.seen_at, claims=each.claims, silent=each.is_silent)
            for line in await queues.lines()
            for each in line.workers
        ]
    )


@api.post("/queue/pause")
async def pause_queue(queues: Queues, caller: Caller, asked: NamedQueue) -> QueueSwitched:
    """Let no worker claim a job of the queue."""
    await answer(queues.named(asked.name).manage.pause())
    await caller.record("queues pause", asked.name, 1)
    return QueueSwitched(queue=asked.name, paused=True)


@api.post("/queue/resume")
async def resume_queue(queues: Queues, caller: Caller, asked: NamedQueue) -> QueueSwitched:
    """Let workers claim jobs of the queue again."""
    await answer(queues.named(asked.name).manage.resume())
    await caller.record("queues resume", asked.name, 1)
    return QueueSwitched(queue=asked.name, paused=False)


@api.post("/jobs")
async def act_on_jobs(queues: Queues, caller: Caller, asked: JobsOrder) -> JobsDone:
    """Retry, promote or remove jobs."""
    queue, ids = queues.named(asked.queue), [*dict.fromkeys(asked.ids)]
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


def _told(job: JobStatus, *, waits: str | None = None, meta: dict[str, str] | None = None) -> JobAnswer:
    shown = {name: getattr(job, name) for name in JobAnswer.model_fields if name not in ("waits", "meta")}
    return JobAnswer(**shown, waits=waits, meta=meta)
