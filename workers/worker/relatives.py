"""The jobs that a running job belongs with: children, which it reads, adds and waits for, and those it came after.

Theory of operation. A handler adds children while its job runs, under ids that a later run finds again. When it has to
wait, its run ends by an exception that means a settlement of its own: the storage takes the job out of `processing` if
a child is unfinished at that moment, and the last child to end makes it claimable. The next run begins from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from workers.ends import EndedJob
from workers.errors import WaitForChildren
from workers.flows import Children, EnqueuedFlow, FlowJob, answers, flatten
from workers.jobs import ChildFailure, Claim, JobOutcome, JobRef, OutcomeKind
from workers.serde import Serde
from workers.specs import new_job
from workers.storage.abilities import KnowsDependencies
from workers.storage.base import FlowStorage, Storage

LASTING: Final = frozenset({ChildFailure.FAIL_PARENT, ChildFailure.CONTINUE_PARENT, ChildFailure.IGNORE})
"""What leaves a trace of a failed child at its parent, whatever becomes of the child's record.

Without a trace a later run would add the child again, and so on without end.
"""


class OwnChildren:
    """The children of one claimed job."""

    __slots__ = ("_claim", "_payload_serde", "_result_serde", "_storage")

    def __init__(self, storage: FlowStorage, serdes: tuple[Serde, Serde], claim: Claim) -> None:
        self._storage = storage
        self._claim = claim
        self._payload_serde, self._result_serde = serdes

    async def read(self, limit: int, cursor: str | None) -> Children:
        """See `Job.children`."""
        if limit < 1:
            raise ValueError(f"a page has at least one child, not {limit}")
        page = await self._storage.children(self._claim, limit=limit, cursor=cursor)
        return Children(
            completed={child: self._result_serde.loads(result) for child, result in page.completed.items()},
            ignored=page.ignored,
            failed=page.failed,
            unfinished=page.unfinished,
            cursor=page.cursor,
        )

    async def add(self, children: Sequence[FlowJob]) -> list[EnqueuedFlow]:
        """See `Job.add_children`."""
        for child in children:
            if child.id is None or child.on_failure not in LASTING:
                parent = self._claim.job_id
                raise ValueError(f"a child of running job {parent!r} needs an id, and `on_failure` other than REMOVE")
        make = partial(new_job, serde=self._payload_serde, queue=self._storage.queue)
        nodes = flatten(children, self._storage.queue, make, further=True)
        return answers(nodes, await self._storage.enqueue_flow(nodes, self._claim), self._result_serde.loads)

    async def wait(self) -> None:
        """See `Job.wait_for_children`."""
        page = await self._storage.children(self._claim, limit=0, cursor=None)
        if page.unfinished:
            raise WaitForChildren(f"job {self._claim.job_id!r} waits for {page.unfinished} of its children")


class Predecessors:
    """Reads, from one storage, how those ended that claimed jobs came after."""

    __slots__ = ("_result_serde", "_storage")

    def __init__(self, storage: Storage, result_serde: Serde) -> None:
        self._storage = storage
        self._result_serde = result_serde

    async def read(self, claim: Claim) -> Mapping[str | JobRef, EndedJob]:
        """See `Job.results`."""
        if not isinstance(self._storage, KnowsDependencies):
            return {}
        found = await self._storage.outcomes(claim.job_id)
        return {
            (job.id if job.queue == self._storage.queue else job): EndedJob(
                job=job, outcome=await self._whole(job, outcome), result_serde=self._result_serde
            )
            for job, outcome in found.items()
        }

    async def _whole(self, job: JobRef, outcome: JobOutcome | None) -> JobOutcome | None:
        """Look for a result that was too large for a copy where it is kept, if that is in this queue."""
        too_large = outcome is not None and outcome.kind is OutcomeKind.COMPLETED and outcome.result is None
        if too_large and job.queue == self._storage.queue:
            kept = await self._storage.result(job.id)
            if kept is not None and kept.kind is OutcomeKind.COMPLETED:
                return kept
        return outcome
