"""A job in memory, as readers of the queue see it."""

from __future__ import annotations

from workers.jobs import JobRecord, JobState, JobStatus
from workers.storage.failures import decode_failures
from workers.storage.memory.lines import StoredJob


def status_of(job: StoredJob, waits_for: int) -> JobStatus:
    """Return the job as it stands; `waits_for` counts the jobs that it still follows."""
    delayed = job.state in (JobState.SCHEDULED, JobState.FAILING)
    return JobStatus(
        id=job.new.id,
        name=job.new.name,
        state=job.state,
        attempt=job.attempts,
        max_attempts=job.new.max_attempts,
        created_at=job.created_at,
        priority=job.new.priority,
        chain_index=job.new.chain_index,
        next_run_at=job.run_at if delayed else None,
        finished_at=job.finished_at,
        worker_id=job.worker_id,
        last_error=job.last_error,
        encoded_progress=job.progress,
        waits_for=waits_for,
    )


def record_of(job: StoredJob, status: JobStatus) -> JobRecord:
    """Return all that is kept of the job."""
    return JobRecord(
        status=status,
        payload=job.new.payload,
        result=job.result if job.state is JobState.COMPLETED else None,
        failures=decode_failures(job.failures),
    )
