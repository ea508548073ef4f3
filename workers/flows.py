"""Flows: trees of jobs in which every job waits for its children, for storages with `capabilities.flows`.

Theory of operation. A tree is turned into a list in which every parent stands before its children, and is checked as a
whole before anything of it is stored. The storage inserts the list in one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from workers.checks import check_text
from workers.jobs import ChildFailure, EnqueueResult, FlowNode, JobRef, NewJob
from workers.specs import Enqueued, JobSpec

MAX_FLOW_JOBS: Final = 1_000
"""How many jobs a flow has at most: the server serves nobody else while it inserts them, which takes about 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowJob(JobSpec):
    """A job of a flow: a `JobSpec`, and the jobs it waits for.

    A job whose id exists stays as it is, as by `Queue.enqueue`, except that it becomes a child, and those below it are
    left out. So a flow whose jobs have ids may be enqueued again.

    `queue` is the name of a queue on the same server (default: the queue on which the flow is enqueued). `on_failure`
    says what the parent does when this job has failed for good (default: it waits, see `ChildFailure`). A delay of a
    job with children begins when they have ended.
    """

    queue: str | None = None
    children: Sequence[FlowJob] = ()
    on_failure: ChildFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedFlow(Enqueued):
    """The outcome for one job of a flow and, if it was inserted, for those below it.

    The `children` of a job that existed are not looked at: what it waits for was decided before.
    """

    children: tuple[EnqueuedFlow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """What became of a job's children, by queue and id.

    `completed` has the decoded results. `ignored` has the reasons of failures that `IGNORE` and `CONTINUE_PARENT`
    allow, `failed` those of failures that fail the job, None if the child's record is gone. `unfinished` counts the
    children that the job still waits for. `cursor` fetches further ones that have ended; None means that there are
    none.
    """

    completed: Mapping[JobRef, Any] = field(default_factory=dict, repr=False)  # Any: what handlers returned
    ignored: Mapping[JobRef, str] = field(default_factory=dict)
    failed: Mapping[JobRef, str | None] = field(default_factory=dict)
    unfinished: int = 0
    cursor: str | None = None


def flatten(
    trees: Iterable[FlowJob], queue: str, make: Callable[[JobSpec], NewJob], *, further: bool = False
) -> list[FlowNode]:
    """Return the jobs of the trees, every parent before its children; `further`: the trees are children themselves.

    Raises:
        ValueError: more than `MAX_FLOW_JOBS` jobs, an id twice in one queue, a root with `on_failure`, or a job that is
            none.
        TypeError: a payload of a type the serde does not know.
    """
    waiting: deque[tuple[FlowJob, int | None]] = deque((tree, None) for tree in trees)
    nodes: list[FlowNode] = []
    places: set[JobRef] = set()
    while waiting:
        spec, parent = waiting.popleft()
        if len(nodes) + len(waiting) + len(spec.children) >= MAX_FLOW_JOBS:
            raise ValueError(f"a flow has at most {MAX_FLOW_JOBS} jobs")
        node = _node(spec, parent, queue, make)
        _check_place(node, places, has_parent=further or parent is not None)
        waiting.extend((child, len(nodes)) for child in spec.children)
        nodes.append(node)
    return nodes


def _node(spec: FlowJob, parent: int | None, queue: str, make: Callable[[JobSpec], NewJob]) -> FlowNode:
    return FlowNode(
        job=make(spec),
        queue=queue if spec.queue is None else spec.queue,
        parent=parent,
        on_failure=None if spec.on_failure is None else ChildFailure(spec.on_failure),
        awaits=bool(spec.children),
    )


def _check_place(node: FlowNode, places: set[JobRef], *, has_parent: bool) -> None:
    check_text("queue name", node.queue)
    if node.on_failure is not None and not has_parent:
        raise ValueError(f"job {node.job.id!r} has no parent that its failure could mean something to")
    place = JobRef(node.queue, node.job.id)
    if place in places:
        raise ValueError(f"job {place.id!r} of queue {place.queue!r} is twice in one flow")
    places.add(place)


def answers(
    nodes: Sequence[FlowNode], results: Sequence[EnqueueResult | None], loads: Callable[[bytes], object]
) -> list[EnqueuedFlow]:
    """Return the outcomes as trees again; `loads` decodes results."""
    below: list[list[EnqueuedFlow]] = [[] for _ in nodes]
    top: list[EnqueuedFlow] = []
    for at, (node, result) in reversed(list(enumerate(zip(nodes, results, strict=True)))):
        if result is not None:
            answer = EnqueuedFlow(
                id=result.id,
                status=result.status,
                existing_state=result.existing_state,
                result=None if result.result is None else loads(result.result),
                children=tuple(reversed(below[at])),
            )
            (top if node.parent is None else below[node.parent]).append(answer)
    return top[::-1]
