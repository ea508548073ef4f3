"""Joins: a task that runs with the results of jobs that were enqueued with it, in their order.

Theory of operation. The jobs and the one that joins them are enqueued in one step. Instead of arguments, the payload of
the join names the jobs. It waits for them as `JobSpec.after` says, or, on a storage that has flows and no dependencies,
as their parent. Each run reads what they gave by `job.results()` or `job.children()`, both of which last as long as the
join, and puts it into the place of the first argument; then it is a run like any other, whose arguments are checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from workers.checks import new_id
from workers.ends import EndedJob
from workers.errors import CorruptPayloadError, JobCancelledError, JobFailedError, JobGoneError, Unsupported
from workers.flows import FlowJob
from workers.jobs import ChildFailure, JobRef
from workers.queue import Queue
from workers.specs import Enqueued, JobSpec, check_spec
from workers.tasks.arguments import Arguments
from workers.tasks.declared import Task, validated
from workers.tasks.typed import TypedTask
from workers.worker.attempt import invoke
from workers.worker.handlers import HandlerFunction, Job

MARK: Final = "workers:results"
"""The only name in the payload of a join: the ids of the jobs whose results it gets."""
NAMED: Final = 10
"""How many jobs an error names at most."""
_FLOW: Final = frozenset(
    ("payload", "id", "name", "delay", "at", "max_attempts", "result_ttl", "keep_completed", "keep_failed", "priority")
) | {"ordering_key", "limit_key", "fair_key", "backoff", "meta"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Jobs, each with an id, and the one that joins them."""

    parts: Sequence[JobSpec]
    join: JobSpec

    async def enqueue(self, queue: Queue, connection: object | None) -> Enqueued:
        """Enqueue all of them in one step, and return the join.

        Raises:
            Unsupported: the storage lets no job wait for others, or has no transactions for the `connection`.
        """
        storage = queue.storage
        if storage.capabilities.dependencies:
            join = replace(self.join, after=[part.id for part in self.parts if part.id is not None])
            return (await queue.enqueue_many([*self.parts, join], connection=connection))[-1]
        if not storage.capabilities.flows:
            raise Unsupported(f"{storage!r} lets no job wait for others, so nothing can be gathered on it")
        if connection is not None:
            raise Unsupported(f"{storage!r} cannot join a transaction; gather after it has committed")
        children = [_node(part, on_failure=ChildFailure.FAIL_PARENT) for part in self.parts]
        return await queue.enqueue_flow(_node(self.join, children=children))


def gathering(specs: Iterable[JobSpec], then: Task) -> Gathering:
    """Return the jobs of these specs, joined by the task.

    Raises:
        ValueError: a job that is twice there, follows others or has a deduplication key, by which another would run.
        TypeError: a task without a first argument, or with others that need a value.
    """
    _first_of(then)
    parts = [replace(check_spec(spec), id=new_id() if spec.id is None else spec.id) for spec in specs]
    for part in parts:
        if part.deduplication is not None or tuple(part.after):
            raise ValueError(f"a job to gather has no deduplication key and follows none: {part.name!r} does")
    ids = [part.id for part in parts]
    if len(set(ids)) < len(ids):
        raise ValueError("a job to gather is there once, and ids are different")
    limit_key = then.limit_key({})
    payload = {MARK: ids}
    join = JobSpec(payload=payload, id=new_id(), name=then.name, max_attempts=then.max_attempts, limit_key=limit_key)
    return Gathering(parts=parts, join=join)


def joining(task: Task) -> HandlerFunction:
    """Return the task's handler function, which gets results where its job is a join; see `validated`."""
    plain = validated(task)
    if not isinstance(task, TypedTask):
        return plain

    async def run(job: Job) -> object:
        ids = _ids_in(job.payload)
        if ids is None:
            return await invoke(plain, job)
        results = await _results(job, ids)
        _check_each(task, job, dict(zip(ids, results, strict=True)))
        return await invoke(plain, replace(job, payload={_first_of(task): results}))

    return run


def _ids_in(payload: object) -> list[str] | None:
    """Return the ids in the payload of a join, None for any other."""
    if not isinstance(payload, dict) or payload.keys() != {MARK}:
        return None
    ids = payload[MARK]
    return ids if isinstance(ids, list) and all(isinstance(each, str) for each in ids) else None


async def _results(job: Job, ids: Sequence[str]) -> list[object]:
    """Return what these jobs gave, in their order.

    Raises:
        CorruptPayloadError: a result is gone, or cannot be decoded; the message names its job.
    """
    if not ids:
        return []
    ended: Mapping[str | JobRef, EndedJob] = await job.results()
    if ended:
        return [_read(job, job_id, ended.get(job_id)) for job_id in ids]
    found = await _of_children(job)
    if missing := [job_id for job_id in ids if job_id not in found]:
        raise CorruptPayloadError(f"job {job.id!r}: the result of job {missing[0]!r}, which it joins, is not there")
    return [found[job_id] for job_id in ids]


def _read(job: Job, job_id: str, ended: EndedJob | None) -> object:
    problem = "it is not among those that it came after"
    if ended is not None:
        try:
            result: object = ended.result
        except (JobFailedError, JobCancelledError, JobGoneError) as error:
            problem = str(error)
        except ValueError as error:  # not quoted: it may have parts of the result
            problem = type(error).__name__
        else:
            return result
    raise CorruptPayloadError(
        f"job {job.id!r}: the result of job {job_id!r}, which it joins, cannot be read: {problem}"
    )


async def _of_children(job: Job) -> dict[str, object]:
    """Return what the children of a flow gave, by id."""
    found: dict[str, object] = {}
    cursor: str | None = None
    while True:
        try:
            page = await job.children(cursor=cursor)
        except Unsupported:  # it came after them, and an operator did not wait for any
            return {}
        except ValueError as error:
            raise CorruptPayloadError(f"job {job.id!r}: a result that it joins cannot be read") from error
        found.update({ref.id: result for ref, result in page.completed.items()})
        if (cursor := page.cursor) is None:
            return found


def _check_each(task: TypedTask[..., Any], job: Job, results: Mapping[str, object]) -> None:
    """Name the job whose result the task refuses, where others of the same kind are taken.

    Raises:
        CorruptPayloadError: the first argument has another type; the message names the job, and quotes nothing.
    """
    first, check = _first_of(task), task.arguments.decoded
    problem = _problem(check, {first: list(results.values())})
    if problem is None:
        return
    alone = [job_id for job_id, result in results.items() if _problem(check, {first: [result]}) is not None]
    named = ", ".join(map(repr, alone[:NAMED] or list(results)[:NAMED]))
    raise CorruptPayloadError(f"job {job.id!r}: task {task.name!r} refuses what it joins, of job {named}: {problem}")


def _problem(check: Callable[[object], object], payload: object) -> str | None:
    try:
        check(payload)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _node(spec: JobSpec, **more: Any) -> FlowJob:  # Any: what a flow's job has besides
    return FlowJob(**{name: getattr(spec, name) for name in _FLOW}, **more)


def _first_of(task: Task) -> str:
    """Return the name of the argument that gets the results."""
    if not isinstance(task, TypedTask):
        raise TypeError(f"task {task.name!r} has no arguments; a join is a function with annotated ones")
    arguments: Arguments = task.arguments
    own = list(inspect.signature(arguments.function).parameters.values())[1 if arguments.takes_job else 0 :]
    needed = [each.name for each in own[1:] if each.default is inspect.Parameter.empty]
    if not own or needed:
        raise TypeError(f"task {task.name!r}: a join gets the results as its first argument, and no other: {needed}")
    return own[0].name
