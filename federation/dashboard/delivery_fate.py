"""What becomes of a delivery."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from db import AttemptOutcome, DeliveryState, HoldReason
from federation.admin.attempts import LoggedAttempt
from federation.admin.deliveries.deliveries import DeliveryRow
from federation.delivery.rows import series_job_id
from workers.dashboard.catalog import NoAnswer, answer
from workers.dashboard.text import ago, short, since
from workers.errors import WorkersError
from workers.jobs import JobState, JobStatus

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

_HELD_FOR: Final = {
    HoldReason.SERVER: "its server, which is down, refuses, shows another key, or was put on hold",
    HoldReason.ORDER: "an older delivery of the same ordering key",
    HoldReason.REST: "the end of the pause that its server asked for",
    HoldReason.BUSY: "room among the attempts that wait for slow servers",
    HoldReason.OURS: "this node, which could not do its part",
    HoldReason.ALONE: "a later try: its server takes others, and did not take this one",
}


async def job_of(federation: Federation, row: DeliveryRow) -> JobStatus | None:
    """Return the job of the delivery; None if there is none, or its queue is away."""
    try:
        queue = federation.delivery_queues.of(row.job_name)
        return await answer(queue.get_status(series_job_id(row.id, row.series)))
    except (WorkersError, NoAnswer):
        return None


async def unheard(federation: Federation, row: DeliveryRow, job: JobStatus | None) -> str | None:
    """Say for how long the worker that holds the job has not been heard of, if that is longer than a lease.

    One that lives renews its lease several times before it ends.
    """
    if job is None or job.state is not JobState.PROCESSING or job.worker_id is None:
        return None
    try:
        workers = await answer(federation.delivery_queues.of(row.job_name).manage.workers())
    except (WorkersError, NoAnswer):
        return None
    seen_at = next((each.seen_at for each in workers if each.id == job.worker_id), None)
    if seen_at is None:
        return "for long"
    is_late = datetime.now(UTC) - seen_at > federation.settings.federation_lease
    return f"since {seen_at:%d %b %H:%M:%S} UTC" if is_late else None


def what_next(row: DeliveryRow, job: JobStatus | None, unheard: str | None = None) -> str:
    """Say what becomes of the delivery; *unheard* is what `unheard` says of its job's worker."""
    match row.state:
        case DeliveryState.HELD:
            why = _HELD_FOR[row.held_reason] if row.held_reason else "its time"
            until = "" if row.held_until is None else f", until {row.held_until:%d %b %H:%M:%S} UTC at the latest"
            return f"It is held, and waits for {why}{until}."
        case DeliveryState.FAILED:
            return "It was given up: it failed for good. It is kept for a week, and retried only if somebody asks."
        case DeliveryState.EXPIRED:
            return "It was given up: it was held until it was too old. It is retried only if somebody asks."
    if job is None:
        return "It is owed, and its job is not in the queue at this moment; the sweeper adds what is missing."
    if job.next_run_at is not None:
        left = ago(job.next_run_at - datetime.now(UTC))
        return f"It is tried again in {left}: attempt {job.attempt + 1} of {job.max_attempts}."
    if unheard is not None:
        return f"Its worker has not been heard of {unheard}, and its lease is over: the next worker tries it again."
    if job.state is JobState.PROCESSING:
        return f"It is being sent: attempt {job.attempt} of {job.max_attempts}."
    return f"Its job is {job.state.value}, made {since(job.created_at)} ago."


def gone_how(attempts: Sequence[LoggedAttempt]) -> str:
    """Say what became of a delivery that has no row any more, by its attempts, the latest first."""
    last = attempts[0]
    if last.outcome is AttemptOutcome.DELIVERED:
        by = f", through {short(last.relayed_by)}" if last.relayed_by else ""
        return f"It was delivered to {short(last.server_url)} {since(last.started_at)} ago{by}."
    return "It was dropped, or was given up and purged. These are its attempts, as far as the log goes back."
