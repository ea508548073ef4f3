"""A job as it was read, compared with what should have been read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial

from workers.jobs import FAILURES_KEPT, ErrorInfo, JobOutcome, JobRecord, JobRef, JobState, JobStatus
from workers.limits import HeldBack
from workers.testing.expected import ExpectedJob


def compare_status(found: JobStatus, job: ExpectedJob, slack: timedelta) -> None:
    waits = job.state in (JobState.SCHEDULED, JobState.FAILING)
    told = (found.state, found.attempt, found.max_attempts, found.name, found.priority, found.worker_id)
    expected = (job.state, job.attempts, job.new.max_attempts, job.new.name, job.new.priority, job.worker_id)
    assert told == expected, f"{found.id!r}: {told}, expected {expected}"
    assert found.chain_index == job.new.chain_index
    times = (found.created_at, found.next_run_at, found.finished_at)
    expected_times = (job.created_at, job.run_at if waits else None, job.finished_at)
    near = all(map(partial(_near, slack), times, expected_times))
    assert near, f"{found.id!r}: {times}, expected {expected_times}"
    assert found.encoded_progress == job.progress
    if job.state in (JobState.FAILING, JobState.FAILED):
        compare_errors(found.last_error, job.error)


def compare_record(found: JobRecord, job: ExpectedJob) -> None:
    """Compare what is kept beside the status; of a completed job payload and failures may be gone."""
    completed = job.state is JobState.COMPLETED
    assert found.payload == job.new.payload or (completed and found.payload is None), f"{found.status.id!r}: {found}"
    assert found.result == (job.result if completed else None)
    assert found.meta == job.new.meta
    failures = tuple(one.attempt for one in found.failures)
    assert failures == job.failures[-FAILURES_KEPT:] or (completed and not failures), f"{found.status.id!r}: {failures}"


def compare_held_back(
    job_id: str, found: HeldBack | None, best: HeldBack | None, worst: HeldBack | None, slack: timedelta
) -> None:
    """Compare what keeps a job back, where that is certain."""
    if best != worst:
        return
    keys, times = zip(*[(None, None) if one is None else (one[:2], one.until) for one in (found, best)], strict=True)
    assert keys[0] == keys[1], f"{job_id!r} is kept back {found}, expected {best}"
    assert _near(slack, *times), f"{job_id!r} is kept back {found}, expected {best}"


def _near(slack: timedelta, one: datetime | None, other: datetime | None) -> bool:
    return one == other or (one is not None and other is not None and abs(one - other) <= slack)


def compare_errors(found: ErrorInfo | None, expected: ErrorInfo | None) -> None:
    """Compare errors; a storage chooses its own words for a job that it gave up."""
    if expected is None or expected.type not in ("StalledError", "DependencyFailed"):
        assert found == expected
    else:
        assert found is not None
        assert (found.type, found.exhausted) == (expected.type, expected.exhausted)


def compare_told(found: Mapping[JobRef, JobOutcome | None], expected: Mapping[str, ExpectedJob | None]) -> None:
    """Compare what a job reads of those that it came after with how these ended."""
    assert {one.id for one in found} == set(expected)
    for ref, outcome in found.items():
        job = expected[ref.id]
        assert (outcome is None) == (job is None), f"{ref}: {outcome}, expected {job}"
        if outcome is not None and job is not None:
            completed = job.state is JobState.COMPLETED
            assert (outcome.kind.value, outcome.result) == (job.state.value, job.result if completed else None)
            compare_errors(outcome.error, job.error if job.state is JobState.FAILED else None)
