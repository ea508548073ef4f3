"""Handlers that read how the jobs ended that their job came after."""

from __future__ import annotations

from collections.abc import Mapping

from workers.ends import EndedJob
from workers.jobs import Claim, JobOutcome, JobRef, OutcomeKind
from workers.serde import Serde
from workers.storage.abilities import KnowsDependencies
from workers.storage.base import Storage


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
