"""Flows: jobs that wait for other jobs, their children; as a storage takes them, and what it tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from workers.jobs.job import JobRef, NewJob


class ChildFailure(StrEnum):
    """What the final failure of a child means for its parent; the values are the options of BullMQ.

    Without one of them the parent waits until somebody has retried the child, and it has completed, or until the
    child's record is over: then nobody waits for it any more.

    `FAIL_PARENT`: the parent fails too, without a run of its own. `CONTINUE_PARENT`: the parent runs at once, though
    other children may be unfinished, and cannot complete before they have ended. `IGNORE`: the parent waits for the
    others, and is told of the failure. `REMOVE`: the parent waits for the others, as if it had not had this child.
    """

    FAIL_PARENT = "failParentOnFailure"
    CONTINUE_PARENT = "continueParentOnFailure"
    IGNORE = "ignoreDependencyOnFailure"
    REMOVE = "removeDependencyOnFailure"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowNode:
    """One job of a flow, in a list in which every parent stands before its children.

    `parent` is the place of its parent in the list; None for the top of the tree, or for a child of a running job.
    `awaits` says whether the job has children in the list.
    """

    job: NewJob
    queue: str
    parent: int | None = None
    on_failure: ChildFailure | None = None
    awaits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildrenPage:
    """Some children of a job; `cursor` fetches more of those that have ended, None means that there are none.

    `completed` has their results; `ignored` and `failed` the reasons of failures, those of `failed` only as long as
    the child's record is kept. `unfinished` counts the children that the job still waits for, on whatever page.
    """

    completed: Mapping[JobRef, bytes] = field(default_factory=dict, repr=False)
    ignored: Mapping[JobRef, str] = field(default_factory=dict)
    failed: Mapping[JobRef, str | None] = field(default_factory=dict)
    unfinished: int = 0
    cursor: str | None = None
